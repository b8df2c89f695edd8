"""The rows of instances: create, list, change and delete them."""
