from __future__ import annotations

from django.db import transaction
from django.forms import modelform_factory
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods

from shop.models import Order
from shop.workflows import order

OrderForm = modelform_factory(Order, fields=("customer", "amount"))


@require_http_methods(["GET", "POST"])
def new_order(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        with transaction.atomic():  # the order and its workflow: both, or none
            placed = form.save()
            order.create(placed.pk, id=f"order-{placed.pk}")
        return redirect("order", pk=placed.pk)
    return render(request, "shop/new_order.html", {"form": form})


def order_detail(request: HttpRequest, pk: int) -> HttpResponse:
    placed = get_object_or_404(Order, pk=pk)
    status = order.get(f"order-{pk}").status()
    return render(request, "shop/order.html", {"order": placed, "status": status})


def decide(_: HttpRequest, pk: int, decision: str, token: str) -> HttpResponse:
    """Serve the link of the mail that asks for approval."""
    placed = get_object_or_404(Order, pk=pk, token=token)
    order.get(f"order-{pk}").send_event("approval", decision, id=f"decision-{pk}")
    return redirect("order", pk=placed.pk)
