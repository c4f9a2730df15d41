"""What the text of a setting stands for: YAML, numbers, words, true and false."""

from typing import Any

WANTED = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text",
    tuple: "whole numbers separated by commas", dict: "names and numbers, such as {margin: 0.5}",
}  # fmt: skip


def unbracketed(text: str) -> str:
    text = text.strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def yaml_of(text: str) -> Any:
    """The value of a YAML text; ValueError if it is none."""
    import yaml

    try:
        return without_aliases(text)
    except (yaml.YAMLError, RecursionError):
        raise ValueError from None


def without_aliases(text: str) -> Any:
    """The values of a YAML text without aliases, of which a few lines can stand for gigabytes."""
    import yaml

    for token in yaml.scan(text, yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            raise yaml.YAMLError(f"line {token.start_mark.line + 1} has the alias *{token.value}: write the value itself")
    return yaml.safe_load(text)


def option_of(value: Any) -> float | bool | str:
    """A number, true or false, or a word; as text they are told apart as YAML does."""
    parsed = yaml_of(value) if isinstance(value, str) else value
    if isinstance(parsed, bool):
        return parsed
    try:
        return float(parsed)
    except ValueError:
        return parsed


def boolean_of(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.lower() in ("true", "yes", "on")
    raise ValueError
