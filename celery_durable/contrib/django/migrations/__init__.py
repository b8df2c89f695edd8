"""The migrations of ``manage.py migrate``: one for each revision of the store."""
