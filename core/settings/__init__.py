"""Settings: a TOML file, the environment, the command line and Python become one checked config, and then one decided stack.

Must not know: where tensors are, torch.
"""
