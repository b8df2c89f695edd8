"""Every exception. Each message says what is wrong, with which value, and what to do next.

::

    DurableError
      NotConfigured, ConfigInvalid (SettingUnknown), CreateDisabled, StoreMismatch, AliasMismatch, SchemaOutdated,
      SchemaIncomplete, UnsupportedDatabase, StoreUnavailable
      DefinitionInvalid (AsyncNotSupported), WorkflowNameTaken, BindingKeyTaken, WorkflowsRequired, WorkflowNotFound
      ValueRefused (NameInvalid, InvalidInstanceId, InvalidEventType, InvalidTopic, InvalidLabel, TooManyLabels,
                    EmissionMismatch, DurationInvalid, InstantInvalid, StartTooFar, SleepTooFar, CursorInvalid,
                    FilterTooBroad, NotSerializable, PayloadTooLarge, BatchTooLarge, TaskRefused)
      WorkflowParamsInvalid, WorkflowOutputInvalid, EventRefused
      InstanceNotFound, RunNotFound, StepNotFound, InstanceAlreadyExists, InstanceTerminal, InstanceNotErrored,
      StepNotOpen, NotInOutbox, NotGivenUp, OutOfScope, VersionMismatch, ResultTimeout, WorkflowFailed
      NonRetryableError                    raised by step functions; below it, what no retry can help
        StepTypeMismatch, StepNameReused, StepLimitExceeded, StepTxMisuse, StepMisuse, BranchNeverGathered,
        StepResultInvalid, StepCommitConflict, StepCancelled, HandlerAnswerInvalid, RetryDelayInvalid
      StepFailed                           raised in the workflow by a failed step
        StepTimeout, StepLost, StepMaxAttemptsExceeded, EventTimeout, EventPayloadInvalid
      SuspensionSwallowed, WorkerCrashLoop  fail an instance as a whole
      PassStalled                            logged, never raised
    Interruption (BaseException)           unwinds workflow code; not for users
      Suspend, StepInterrupted, Superseded, PassBroken
"""

from celery_durable.errors.base import (
    DurableError,
    Interruption,
    PassBroken,
    PassStalled,
    StepInterrupted,
    Superseded,
    Suspend,
)
from celery_durable.errors.configuration import (
    AsyncNotSupported,
    BindingKeyTaken,
    ConfigInvalid,
    CreateDisabled,
    DefinitionInvalid,
    NotConfigured,
    SettingUnknown,
    WorkflowNameTaken,
    WorkflowNotFound,
    WorkflowsRequired,
)
from celery_durable.errors.instances import (
    InstanceAlreadyExists,
    InstanceNotErrored,
    InstanceNotFound,
    InstanceTerminal,
    OutOfScope,
    ResultTimeout,
    RunNotFound,
    StepNotFound,
    StepNotOpen,
    SuspensionSwallowed,
    VersionMismatch,
    WorkerCrashLoop,
    WorkflowFailed,
)
from celery_durable.errors.servers import (
    AliasMismatch,
    NotGivenUp,
    NotInOutbox,
    SchemaIncomplete,
    SchemaOutdated,
    StoreMismatch,
    StoreUnavailable,
    UnsupportedDatabase,
)
from celery_durable.errors.steps import (
    BranchNeverGathered,
    EventPayloadInvalid,
    EventTimeout,
    HandlerAnswerInvalid,
    NonRetryableError,
    RetryDelayInvalid,
    StepCancelled,
    StepCommitConflict,
    StepFailed,
    StepLimitExceeded,
    StepLost,
    StepMaxAttemptsExceeded,
    StepMisuse,
    StepNameReused,
    StepResultInvalid,
    StepTimeout,
    StepTxMisuse,
    StepTypeMismatch,
)
from celery_durable.errors.values import (
    BatchTooLarge,
    CursorInvalid,
    DurationInvalid,
    EmissionMismatch,
    EventRefused,
    FilterTooBroad,
    InstantInvalid,
    InvalidEventType,
    InvalidInstanceId,
    InvalidLabel,
    InvalidTopic,
    NameInvalid,
    NotSerializable,
    PayloadTooLarge,
    SleepTooFar,
    StartTooFar,
    TaskRefused,
    TooManyLabels,
    ValueRefused,
    WorkflowOutputInvalid,
    WorkflowParamsInvalid,
)

__all__ = [
    "AliasMismatch",
    "AsyncNotSupported",
    "BatchTooLarge",
    "BindingKeyTaken",
    "BranchNeverGathered",
    "ConfigInvalid",
    "CreateDisabled",
    "CursorInvalid",
    "DefinitionInvalid",
    "DurableError",
    "DurationInvalid",
    "EmissionMismatch",
    "EventPayloadInvalid",
    "EventRefused",
    "EventTimeout",
    "FilterTooBroad",
    "HandlerAnswerInvalid",
    "InstanceAlreadyExists",
    "InstanceNotErrored",
    "InstanceNotFound",
    "InstanceTerminal",
    "InstantInvalid",
    "Interruption",
    "InvalidEventType",
    "InvalidInstanceId",
    "InvalidLabel",
    "InvalidTopic",
    "NameInvalid",
    "NonRetryableError",
    "NotConfigured",
    "NotGivenUp",
    "NotInOutbox",
    "NotSerializable",
    "OutOfScope",
    "PassBroken",
    "PassStalled",
    "PayloadTooLarge",
    "ResultTimeout",
    "RetryDelayInvalid",
    "RunNotFound",
    "SchemaIncomplete",
    "SchemaOutdated",
    "SettingUnknown",
    "SleepTooFar",
    "StartTooFar",
    "StepCancelled",
    "StepCommitConflict",
    "StepFailed",
    "StepInterrupted",
    "StepLimitExceeded",
    "StepLost",
    "StepMaxAttemptsExceeded",
    "StepMisuse",
    "StepNameReused",
    "StepNotFound",
    "StepNotOpen",
    "StepResultInvalid",
    "StepTimeout",
    "StepTxMisuse",
    "StepTypeMismatch",
    "StoreMismatch",
    "StoreUnavailable",
    "Superseded",
    "Suspend",
    "SuspensionSwallowed",
    "TaskRefused",
    "TooManyLabels",
    "UnsupportedDatabase",
    "ValueRefused",
    "VersionMismatch",
    "WorkerCrashLoop",
    "WorkflowFailed",
    "WorkflowNameTaken",
    "WorkflowNotFound",
    "WorkflowOutputInvalid",
    "WorkflowParamsInvalid",
    "WorkflowsRequired",
]

# Pickles, tracebacks and logs name the documented module, so that files in this folder can change.
for _name in __all__:
    globals()[_name].__module__ = __name__
