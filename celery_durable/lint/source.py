"""The syntax tree of a module, with answers about names: what a name was imported as, and where it is bound."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope: TypeAlias = Function | ast.Module

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Source:
    """A parsed module."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._bindings: dict[Scope, Bindings] = {}

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that contains this one."""
        return self._parents.get(node)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield the functions and methods of the module, at all depths."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    def scopes(self, node: ast.AST) -> Iterator[Scope]:
        """Yield the functions around a node, then the module. Decorators, defaults, annotations lie outside theirs."""
        child, parent = node, self.parent(node)
        while parent is not None:
            if isinstance(parent, _FUNCTIONS) and _runs_inside(parent, child):
                yield parent
            child, parent = parent, self.parent(parent)
        yield self.tree

    def bindings(self, scope: Scope) -> Bindings:
        """Return the names that a function or the module binds."""
        if scope not in self._bindings:
            self._bindings[scope] = Bindings(scope)
        return self._bindings[scope]

    def find_scope(self, name: str, node: ast.AST) -> Scope | None:
        """Return the scope in which the name that a node uses is bound; None for a builtin or unknown name."""
        return next((each for each in self.scopes(node) if name in self.bindings(each).names), None)

    def find_function(self, expression: ast.AST) -> Function | None:
        """Return the function of this module that an expression names, or the lambda that it is."""
        if isinstance(expression, ast.Lambda):
            return expression
        if not isinstance(expression, ast.Name):
            return None
        scope = self.find_scope(expression.id, expression)
        return None if scope is None else self.bindings(scope).functions.get(expression.id)

    def resolve(self, expression: ast.AST) -> str | None:
        """Return the full name of something imported or built in, such as ``datetime.datetime.now``."""
        parts: list[str] = []
        while isinstance(expression, ast.Attribute):
            parts.append(expression.attr)
            expression = expression.value
        if not isinstance(expression, ast.Name):
            return None
        scope = self.find_scope(expression.id, expression)
        if scope is not None:
            origin = self.bindings(scope).imports.get(expression.id)
        else:
            origin = f"builtins.{expression.id}" if hasattr(builtins, expression.id) else None
        return None if origin is None else ".".join([origin, *reversed(parts)])

    def assigned_values(self, name: ast.Name) -> list[ast.expr | None]:
        """Return what a name is assigned in the scope that binds it. None: something that cannot be told."""
        scope = self.find_scope(name.id, name)
        return [] if scope is None else self.bindings(scope).values.get(name.id, [None])


class Bindings:
    """The names that one scope binds, without those of functions in it."""

    def __init__(self, scope: Scope) -> None:
        self.names: set[str] = set()
        self.imports: dict[str, str] = {}
        self.functions: dict[str, Function] = {}
        self.annotations: dict[str, ast.expr] = {}
        self.values: dict[str, list[ast.expr | None]] = {}
        """What is assigned to each name by plain assignments; None for another way, such as a loop."""
        self._declared_elsewhere: set[str] = set()
        self._with_value: set[ast.AST] = set()
        if isinstance(scope, _FUNCTIONS):
            self._add_parameters(scope.args)
        for node in walk_scope(scope):
            self._add(node)
        self.names -= self._declared_elsewhere

    def _add_parameters(self, parameters: ast.arguments) -> None:
        variadic = [each for each in (parameters.vararg, parameters.kwarg) if each is not None]
        for parameter in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs, *variadic):
            self._bind(parameter.arg, None)
            if parameter.annotation is not None:
                self.annotations[parameter.arg] = parameter.annotation

    def _bind(self, name: str, value: ast.expr | None) -> None:
        self.names.add(name)
        self.values.setdefault(name, []).append(value)

    def _add(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._bind(node.name, None)
                self.functions[node.name] = node
            case ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                self._bind(name, None)
            case ast.Import() | ast.ImportFrom():
                self._add_import(node)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self._declared_elsewhere |= set(names)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._bind_with_value(target, value)
            case ast.AnnAssign(target=ast.Name() as target, value=value, annotation=annotation):
                self._bind_with_value(target, value)
                self.annotations[target.id] = annotation
            case ast.NamedExpr(target=target, value=value):
                self._bind_with_value(target, value)
            case ast.Name(id=name, ctx=ast.Store()) if node not in self._with_value:
                self._bind(name, None)

    def _add_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                name, origin = alias.asname or alias.name, f"{node.module or ''}.{alias.name}"
            else:
                top = alias.name.partition(".")[0]
                name, origin = alias.asname or top, alias.name if alias.asname else top
            self._bind(name, None)
            self.imports[name] = origin

    def _bind_with_value(self, target: ast.Name, value: ast.expr | None) -> None:
        self._with_value.add(target)
        self._bind(target.id, value)


def walk_scope(scope: Scope) -> Iterator[ast.AST]:
    """Yield the nodes that run in a scope itself, not those inside of the functions in it, in the order of the text."""
    if isinstance(scope, ast.Lambda):
        yield from _walk(scope.body)
    else:
        for statement in scope.body:
            yield from _walk(statement)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(node, _FUNCTIONS) or not _runs_inside(node, child):
            yield from _walk(child)


def _runs_inside(function: Function, child: ast.AST) -> bool:
    """Whether a child of a function's node runs when the function is called."""
    return child is function.body if isinstance(function, ast.Lambda) else child in function.body
