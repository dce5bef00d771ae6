"""Tokens and experts: routing, dispatch, and where an expert's activations and weights may leave the device.

One invariant: nothing here touches a stream, an event or pinned memory; it marks groups and the engine moves
them. The modules arrive with the issue that needs them.
"""
