"""Accuracy of a policy against full attention, on the same prompts.

Nothing in here knows SGLang: prompts, scoring and the report. What runs the model hands over texts and logprobs.
"""
