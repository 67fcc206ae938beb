"""Run the engine's step on flat buffers, with one kernel launch for all layers."""
