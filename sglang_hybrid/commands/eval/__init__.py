"""Measures the accuracy of a policy against full attention on the same prompts.

Prompts, scoring and the report know nothing about SGLang: the code that runs the model gives them texts and logprobs.
"""
