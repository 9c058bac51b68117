"""A loaded model in a process of its own, which a report asks for measurements.

    client        starts the process, asks, hears of progress; the report's side
    child         the process: loads the model, answers one request after the other
    load          what is loaded, and SGLang's command line for it
    messages      lines of JSON between the two
    prompts       text and needles in the model's tokens
    evaluate, ratios, speed, cosines, breakdown      one kind of measurement each

A process holds one model with one pool: SGLang's state is global, and some policies keep codes of keys that are made
in prefill. A measurement that crashes takes its process along and nothing else.
"""
