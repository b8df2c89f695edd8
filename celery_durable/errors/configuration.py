"""Errors of the settings and of the set-up of a process."""

from __future__ import annotations

from celery_durable.errors.base import DurableError, quote


class NotConfigured(DurableError):
    """A workflow was used in a process without a `Durable` that is attached to a Celery app.

    Also raised if several apps have one and none of them is current. Import the module that creates it first, or call
    ``app.set_current()``.

    Attributes:
        what: What needs a `Durable`.
    """

    code = "NOT_CONFIGURED"

    def __init__(self, what: str, remedy: str | None = None) -> None:
        self.what = what
        super().__init__(
            f"{what} needs a Durable, and this process has none (or several and no current Celery app). "
            "Either attach one to your app, `durable = Durable(app)`, and import that module first, "
            "or make the app current with `app.set_current()`."
            if remedy is None
            else f"{what} needs a Durable, and there is none here. {remedy}"
        )


class ConfigInvalid(DurableError):
    """A setting, or an argument that configures something, has a value that cannot be used.

    The message says which values can.

    Attributes:
        setting: The name of the setting or argument.
        value: Its value.
        remedy: Which values can be used.
    """

    code = "CONFIG_INVALID"

    def __init__(self, setting: str, value: object, remedy: str) -> None:
        self.setting, self.value, self.remedy = setting, value, remedy
        super().__init__(f"Setting {setting}={quote(value)} cannot be used: {remedy}")


class SettingUnknown(ConfigInvalid):
    """There is no ``durable_*`` setting of this name.

    Correct the name or remove the setting. Its value is not shown, since it may be a URL with a password.

    Attributes:
        setting: The unknown name, as it is written in the configuration.
        value: None.
        remedy: What to do about it.
    """

    code = "SETTING_UNKNOWN"

    def __init__(self, setting: str, near: str | None) -> None:
        remedy = "Remove it." if near is None else f"Did you mean {near}?"
        self.setting, self.value, self.remedy = setting, None, remedy
        DurableError.__init__(self, f"There is no setting {setting}. {remedy}")


class CreateDisabled(DurableError):
    """A new instance was refused, because ``durable_create_enabled`` is off.

    Existing instances continue. Turn the setting on, or try again later.
    """

    code, http_status = "CREATE_DISABLED", 409

    def __init__(self) -> None:
        super().__init__(
            "New instances are refused while durable_create_enabled is off. Existing instances continue. "
            "Turn the setting on, or try again later."
        )
