"""DSpark speculators: draft models that let a verifier emit several tokens a step without changing its output."""

__version__ = "0.1.0"
