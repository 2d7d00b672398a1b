"""extends: where parents are found, and how two files become one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagec.compiler.errors import SpecError
from pagec.compiler.spec import load_spec, parse_spec
from pagec.compiler.spec.family import document_of
from pagec.compiler.spec.source import to_plain


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text)
    return directory


def merged(directory: Path, text: str) -> dict[str, object]:
    return to_plain(document_of(text, str(directory / "child.yaml")).tree)


def test_maps_merge_lists_are_replaced_null_deletes(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="params: {a: 1, rope: {base: 1.0, dims: 8}}\nweights: {w: {}, v: {}}\nlayer_types: [x, y]\n",
    )
    child = "extends: base.yaml\nparams: {rope: {base: 2.0}}\nweights: {w: null}\nlayer_types: [z]\n"
    assert merged(tmp_path, child) == {
        "params": {"a": 1, "rope": {"base": 2.0, "dims": 8}},
        "weights": {"v": {}},
        "layer_types": ["z"],
        "extends": "base.yaml",
    }


def test_a_param_that_is_null_is_none(tmp_path: Path) -> None:
    write(tmp_path, base="params: {window: 5}\ntypes: {a: {window: 3}}\n")
    child = "extends: base.yaml\nparams: {window: null}\ntypes: {a: {window: null}, b: {window: 2}}\n"
    tree = merged(tmp_path, child)
    assert tree["params"] == {"window": None}
    assert tree["types"] == {"a": {"window": None}, "b": {"window": 2}}


def test_required_adds_up(tmp_path: Path) -> None:
    write(tmp_path, base="required: [a, b]\n")
    assert merged(tmp_path, "extends: base.yaml\nrequired: [b, c]\n")["required"] == ["a", "b", "c"]


def test_names_are_families_then_models_and_paths_are_relative(tmp_path: Path, tiny: str) -> None:
    assert parse_spec("extends: smollm2-135m\nparams: {layers: 2}\n", "x.yaml").layers == 2
    (tmp_path / "sub").mkdir()
    write(tmp_path, base=tiny)
    write(tmp_path / "sub", child="extends: ../base.yaml\nparams: {hidden: 16}\n")
    spec = load_spec(tmp_path / "sub" / "child.yaml")
    assert (spec.name, spec.weights["embed"].shape) == ("child", (32, 16))


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("lama", "no family or model is named 'lama'\n  fix: did you mean 'llama'?"),
        ("gone.yaml", "there is no file"),
        ("[a]", "'extends' takes one name"),
        ("3", "'extends' takes one name"),
        ("child.yaml", "cyclic extends: child -> child"),
    ],
)
def test_a_parent_that_is_none(tmp_path: Path, extends: str, message: str) -> None:
    write(tmp_path, child=f"extends: {extends}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "child.yaml")
    assert message in str(caught.value)
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (1, 10)


def test_a_longer_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, a="extends: b.yaml\n", b="extends: c.yaml\n", c="extends: a.yaml\n")
    with pytest.raises(SpecError, match="cyclic extends: a -> b -> c -> a"):
        load_spec(tmp_path / "a.yaml")


def test_inherited_names_may_stay_unused(tmp_path: Path, tiny: str) -> None:
    write(tmp_path, base=tiny.replace("  norm_eps", "  spare: 1\n  norm_eps"))
    assert parse_spec("extends: base.yaml\nparams: {spare: 2}\n", str(tmp_path / "x.yaml"))
    with pytest.raises(SpecError, match="nothing uses the param 'spare'"):
        load_spec(tmp_path / "base.yaml")


def test_the_checkpoint_is_relative_to_the_file_that_names_it(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, child="extends: sub/base.yaml\n")
    write(tmp_path / "sub", base="checkpoint: weights\n" + tiny)
    assert load_spec(tmp_path / "child.yaml").checkpoint == tmp_path / "sub" / "weights"
    assert load_spec(tmp_path / "child.yaml", tmp_path).checkpoint == tmp_path
