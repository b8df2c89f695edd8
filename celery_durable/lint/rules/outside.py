"""Everything outside of the workflow: files, networks, databases, processes, tasks and the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from celery_durable.lint.findings import Finding, Rule
from celery_durable.lint.rules.calls import CallTable
from celery_durable.lint.workflow_code import WorkflowCode

FILES = Rule("CD301", "Read or write the file in a step: step.do(name, fn, path).")
NETWORK = Rule("CD302", "Make the request in a step: step.do(name, fn, ...).")
DATABASE = Rule("CD303", "Query in a step: fn(tx: StepTx, ...) with tx.session, or a connection of its own.")
PROCESSES = Rule("CD304", "Do it in a step, or run branches with step.submit and step.gather.")
SENDS = Rule("CD305", "Use step.task, step.map or step.child, or send it in a step with tx.send_task or tx.create.")
ENVIRONMENT = Rule("CD306", "Read it in a step, or pass it as a parameter of the instance.")

RULES = (FILES, NETWORK, DATABASE, PROCESSES, SENDS, ENVIRONMENT)

_REPEATS = "runs again on each pass"
_FILE_CALLS = CallTable(
    FILES,
    _REPEATS,
    frozenset({
        "builtins.open", "builtins.input", "io.open", "os.listdir", "os.scandir", "os.walk", "os.remove", "os.unlink",
        "os.rename", "os.replace", "os.mkdir", "os.makedirs", "os.rmdir", "os.stat", "os.open", "os.path.exists",
        "os.path.isfile", "os.path.isdir", "os.path.getsize", "os.path.getmtime", "glob.glob", "glob.iglob",
        "codecs.open",
    }),
    prefixes=("shutil.", "tempfile."),
)  # fmt: skip
_PATH_METHODS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "open", "exists", "is_file", "is_dir", "iterdir", "glob",
    "rglob", "stat", "unlink", "mkdir", "rmdir", "rename", "replace", "touch", "resolve", "cwd", "home",
}  # fmt: skip
_HTTP_VERBS = ("get", "post", "put", "patch", "delete", "head", "options", "request", "stream")
_NETWORK_CALLS = CallTable(
    NETWORK,
    _REPEATS,
    frozenset({
        *(f"{library}.{verb}" for library in ("requests", "httpx") for verb in _HTTP_VERBS),
        "requests.Session", "httpx.Client", "httpx.AsyncClient", "aiohttp.ClientSession", "aiohttp.request",
        "urllib.request.urlopen", "urllib.request.urlretrieve", "socket.socket", "socket.create_connection",
        "socket.getaddrinfo", "socket.gethostbyname", "http.client.HTTPConnection", "http.client.HTTPSConnection",
        "smtplib.SMTP", "smtplib.SMTP_SSL", "ftplib.FTP", "boto3.client", "boto3.resource", "boto3.Session",
        "redis.Redis", "redis.from_url", "redis.StrictRedis", "django.core.mail.send_mail",
    }),
    prefixes=("urllib3.request", "urllib3.PoolManager", "paramiko.", "pika.", "kafka."),
)  # fmt: skip
_DATABASE_CALLS = CallTable(
    DATABASE,
    _REPEATS,
    frozenset({
        "sqlite3.connect", "psycopg.connect", "psycopg2.connect", "pymysql.connect", "MySQLdb.connect",
        "asyncpg.connect", "sqlalchemy.create_engine", "sqlalchemy.orm.Session", "pymongo.MongoClient",
        "django.db.connection.cursor", "django.db.transaction.atomic",
    }),
)  # fmt: skip
_PROCESS_CALLS = CallTable(
    PROCESSES,
    _REPEATS,
    frozenset({
        "os.system", "os.popen", "os.fork", "os.kill", "threading.Thread", "threading.Timer", "multiprocessing.Process",
        "multiprocessing.Pool", "asyncio.run", "asyncio.create_task", "asyncio.to_thread",
        "concurrent.futures.ThreadPoolExecutor", "concurrent.futures.ProcessPoolExecutor",
    }),
    prefixes=("subprocess.",),
)  # fmt: skip
_ENVIRONMENT_CALLS = CallTable(
    ENVIRONMENT,
    "differs between workers and deploys",
    frozenset({
        "os.getenv", "os.getenvb", "os.getcwd", "os.uname", "os.cpu_count", "socket.gethostname", "socket.getfqdn",
        "platform.node", "platform.uname", "getpass.getuser", "threading.get_ident", "os.getlogin",
    }),
)  # fmt: skip
_ENVIRONMENT_VALUES = {"os.environ", "os.environb", "sys.argv"}
_SENDING_METHODS = {"delay", "apply_async", "send_task"}
_CREATING_METHODS = {"create", "create_if_not_exists", "create_batch", "restart_or_create"}


def check(code: WorkflowCode) -> Iterator[Finding]:
    """Yield what reaches outside of the workflow."""
    for table in (_FILE_CALLS, _NETWORK_CALLS, _DATABASE_CALLS, _PROCESS_CALLS, _ENVIRONMENT_CALLS):
        yield from table.find(code)
    for node in code.walk():
        yield from _check_methods(code, node)
        if isinstance(node, (ast.Name, ast.Attribute)) and code.source.resolve(node) in _ENVIRONMENT_VALUES:
            name = code.source.resolve(node)
            yield ENVIRONMENT.find(
                node, f"Workflow code of {code.workflow!r} reads {name}, which differs between workers and deploys."
            )


def _check_methods(code: WorkflowCode, node: ast.AST) -> Iterator[Finding]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    method, receiver = node.func.attr, node.func.value
    if method in _PATH_METHODS and _is_path(code, receiver):
        yield FILES.find(node, f"Workflow code of {code.workflow!r} calls {method}() of a path, which {_REPEATS}.")
    elif method in _SENDING_METHODS:
        yield SENDS.find(
            node, f"Workflow code of {code.workflow!r} calls {method}(), which sends a task again on each pass."
        )
    elif method in _CREATING_METHODS and _is_workflow(code, receiver):
        assert isinstance(receiver, ast.Name)
        called = f"{receiver.id}.{method}()"
        yield SENDS.find(
            node, f"Workflow code of {code.workflow!r} calls {called}, which creates an instance on each pass."
        )
    elif isinstance(receiver, ast.Attribute) and receiver.attr == "objects":
        yield DATABASE.find(node, f"Workflow code of {code.workflow!r} queries objects.{method}(), which {_REPEATS}.")


def _is_path(code: WorkflowCode, expression: ast.expr) -> bool:
    match expression:
        case ast.Call(func=called):
            return code.source.resolve(called) == "pathlib.Path"
        case ast.BinOp(left=left, op=ast.Div()):
            return _is_path(code, left)
        case ast.Attribute(value=value, attr="parent"):
            return _is_path(code, value)
        case ast.Attribute() if code.source.resolve(expression) == "pathlib.Path":
            return True
        case ast.Name():
            values = code.source.assigned_values(expression)
            is_class = code.source.resolve(expression) == "pathlib.Path"
            return is_class or (bool(values) and all(each is not None and _is_path(code, each) for each in values))
    return False


def _is_workflow(code: WorkflowCode, expression: ast.expr) -> bool:
    function = code.source.find_function(expression)
    return isinstance(function, ast.FunctionDef) and bool(function.decorator_list)
