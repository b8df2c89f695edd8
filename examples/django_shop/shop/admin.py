from __future__ import annotations

from django.contrib import admin

from shop.models import Email, Order, Payment

admin.site.register([Order, Payment, Email])
