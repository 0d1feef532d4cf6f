"""The laptop side of dflashctl: ship, launch, mirror, show."""

__version__ = "0.1.0"
