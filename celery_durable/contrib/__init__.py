"""Integrations with other libraries. No other module of the package imports them."""
