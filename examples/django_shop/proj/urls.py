from __future__ import annotations

from django.contrib import admin
from django.urls import path
from shop import views

urlpatterns = [
    path("", views.new_order, name="new-order"),
    path("orders/<int:pk>/", views.order_detail, name="order"),
    path("orders/<int:pk>/<str:decision>/<str:token>/", views.decide, name="decide"),
    path("admin/", admin.site.urls),
]
