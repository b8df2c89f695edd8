"""What the application writes: a table without a unique key, in which doubled work shows, and one with a unique key."""

from __future__ import annotations

from django.db import models


class Booking(models.Model):
    instance = models.CharField(max_length=100)
    step = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.step


class Name(models.Model):
    name = models.CharField(max_length=100, unique=True)

    def __str__(self) -> str:
        return self.name
