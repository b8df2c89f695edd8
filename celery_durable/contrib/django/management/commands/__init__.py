"""The command ``durable``."""
