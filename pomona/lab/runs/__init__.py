"""Runs: train one recipe into one folder that can be stopped, killed and resumed."""
