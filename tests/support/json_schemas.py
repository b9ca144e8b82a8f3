"""Random JSON schemas, and texts that follow them or nearly do."""

import json
import random
from typing import Any

NAMES = ("a", "b", "cd", 'q"x')
NUMBERS = (
    "0", "1", "-1", "2.50", "99.95", "99.951", "99.94", "100", "100.0", "7", "6.9999", "7.0001", "-3.25", "-3.26", "-12", "1e5",
    "-2.5E-3", "0.5", "0.49", "1234567890123456789", "10", "11", "12.3", "0.0000012345678901234567",
)  # fmt: skip
_PLAIN = ("number", "number", "integer", "string", "null", "boolean")
_OTHER = ("range", "any", "enum", "const", "pattern")
_NESTED = ("array", "array", "object", "object", "object", "anyOf", "ref", "types", "prefix", "patterns", "allOf")


def random_schema(draw: random.Random, depth: int = 0) -> Any:
    """May refer to `#/$defs/x` and `#/$defs/y`."""

    def part() -> Any:
        return random_schema(draw, depth + 1)

    kind = draw.choice((*_PLAIN, *_OTHER, *(_NESTED if depth < 3 else ())))
    if kind in _PLAIN:
        return {"type": kind}
    if kind == "range":
        low = draw.choice([-12, -3, 0, 7, 10, 100]) if draw.random() < 0.5 else draw.choice([-3.5, 0.5, 99.95])
        schema: dict[str, Any] = {"type": "number" if isinstance(low, float) else draw.choice(["number", "integer"])}
        if draw.random() < 0.7:
            schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
        if draw.random() < 0.7:
            schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.choice([2, 20, 1000])
        return schema
    if kind == "array" or kind == "prefix":
        fewest = draw.randrange(3)
        schema = {"type": "array", "minItems": fewest, "maxItems": fewest + draw.randrange(3), "items": part()}
        if kind == "prefix":
            schema |= {
                "prefixItems": [part() for _ in range(draw.randrange(1, 3))],
                "items": draw.choice([False, part()]),
            }
        return {key: value for key, value in schema.items() if key in ("type", "prefixItems") or draw.random() < 0.6}
    if kind == "object":
        names = draw.sample(NAMES, draw.randrange(4))
        schema = {"type": "object", "properties": {name: part() for name in names}}
        schema["required"] = [name for name in names if draw.random() < 0.5]
        schema["additionalProperties"] = draw.choice([True, False, False, part()])
        schema |= {"minProperties": draw.randrange(3)} if draw.random() < 0.2 else {}
        return schema | ({"maxProperties": schema.get("minProperties", 0) + 1} if draw.random() < 0.2 else {})
    return {
        "any": lambda: draw.choice([True, {}, {"title": "x"}]),
        "enum": lambda: {"enum": draw.sample(["x", 1, 2.5, None, True, [1], {"a": 1}], 2)},
        "const": lambda: {"const": draw.choice(["y", 3, {"a": [1.5]}])},
        "pattern": lambda: {"type": "string", "pattern": "^[a-c]{1,3}$"},
        "anyOf": lambda: {"anyOf": [part(), part()]},
        "allOf": lambda: {"allOf": [part()]},
        "types": lambda: {"type": draw.sample(["number", "integer", "string", "null", "array", "object"], 2)},
        "ref": lambda: {"$ref": draw.choice(["#/$defs/x", "#/$defs/y"])},
        "patterns": lambda: {"type": "object", "patternProperties": {"^a": part()}},
    }[kind]()


def random_root(draw: random.Random) -> dict[str, Any]:
    schema = random_schema(draw)
    definitions = {"x": random_schema(draw, 2), "y": random_schema(draw, 2)}
    return (schema if isinstance(schema, dict) else {"anyOf": [schema]}) | {"$defs": definitions}


def random_text(draw: random.Random, schema: Any, root: dict[str, Any], depth: int = 0) -> str:
    """JSON that often follows the schema."""

    def text(part: Any) -> str:
        return random_text(draw, part, root, depth + 1)

    if not isinstance(schema, dict) or depth > 6 or draw.random() < 0.04:
        schema = {"type": draw.choice(["number", "string", "null", "array" if depth < 4 else "null"])}
    if "$ref" in schema:
        return text(root["$defs"][schema["$ref"].rpartition("/")[2]])
    if "enum" in schema or "const" in schema:
        return json.dumps(draw.choice(schema.get("enum") or [schema["const"]]))
    if composed := schema.get("anyOf") or schema.get("allOf"):
        return text(draw.choice(composed))
    kind = schema.get("type", "number")
    kind = draw.choice(kind) if isinstance(kind, list) else kind
    comma = draw.choice([",", ", "])
    if kind == "array":
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        items = [text(first[i] if i < len(first) else rest) for i in range(draw.randrange(4))]
        return f"[{comma.join(items)}]"
    if kind == "object":
        required, rest = schema.get("required", ()), schema.get("additionalProperties", True)
        known = schema.get("properties", {}).items()
        pairs = [(name, text(part)) for name, part in known if name in required or draw.random() < 0.5]
        pairs += [(draw.choice(("zz", "ab", *NAMES)), text(rest)) for _ in range(draw.choice((0, 0, 1, 2)))]
        return "{" + comma.join(json.dumps(name) + draw.choice([":", ": "]) + value for name, value in pairs) + "}"
    return {
        "string": draw.choice(['"x"', '"abc"', '"a\\"b"', '"\\n"']),
        "null": "null",
        "boolean": "true",
    }.get(kind, draw.choice((*NUMBERS, str(draw.randrange(1, 130)), str(round(draw.uniform(0, 120), 2)))))
