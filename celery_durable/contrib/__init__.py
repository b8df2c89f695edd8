"""Bridges to what others have built. Nothing inside the library imports them."""
