"""The terminal view of a run: pure functions from a `RunState` to lines, and the widgets that show them."""
