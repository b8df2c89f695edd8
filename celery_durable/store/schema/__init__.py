"""The tables, and what each database makes of them."""
