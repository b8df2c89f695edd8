from __future__ import annotations

import secrets

from django.db import models


def new_token() -> str:
    return secrets.token_urlsafe(16)


class Order(models.Model):
    customer: models.EmailField[str, str] = models.EmailField()
    amount: models.PositiveIntegerField[int, int] = models.PositiveIntegerField(help_text="in cents")
    state: models.CharField[str, str] = models.CharField(max_length=20, default="new")
    token: models.CharField[str, str] = models.CharField(max_length=32, default=new_token, editable=False)

    def __str__(self) -> str:
        return f"Order {self.pk} of {self.customer}"


class Payment(models.Model):
    """One row for each charge: a charge that was done twice would show."""

    order: models.ForeignKey[Order, Order] = models.ForeignKey(Order, on_delete=models.CASCADE)
    reference: models.CharField[str, str] = models.CharField(max_length=64)

    def __str__(self) -> str:
        return self.reference


class Email(models.Model):
    """What the shop has sent. A real shop would call its mail server."""

    to: models.EmailField[str, str] = models.EmailField()
    text: models.TextField[str, str] = models.TextField()

    def __str__(self) -> str:
        return f"To {self.to}"
