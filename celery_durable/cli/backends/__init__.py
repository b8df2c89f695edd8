"""Access to instances: in the database of the app, or over the HTTP API."""
