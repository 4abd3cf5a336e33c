"""Says what is installed for distributed training here, what fits together and what does not.

`gather` looks at the environment and returns `Facts`; `checks`, with `torch_checks`, turns facts into problems with
remedies and looks at nothing itself.
"""
