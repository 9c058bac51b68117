"""A loaded model in its own process, which makes measurements for a report.

    client        starts the process, asks, hears of progress; the report's side
    child         the process: loads the model, answers one request after the other
    load          what is loaded, and SGLang's command line for it
    messages      lines of JSON between the two
    prompts       text and needles in the model's tokens
    evaluate, ratios, speed, cosines, breakdown      one kind of measurement each

A process holds one model with one KV pool: SGLang's state is global, and some policies keep codes of keys that are
computed in prefill. A measurement that crashes ends only its own process.
"""
