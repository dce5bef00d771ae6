"""Weights that wait on the host: a client of the engine that brings each block's to the device before use."""
