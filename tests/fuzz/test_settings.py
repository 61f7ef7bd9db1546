"""Settings from flags, variables and files: settings, or a refusal of one line."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.security import api_keys
from pagewire.shared.security.api_keys import ApiKeys
from pagewire.shared.settings import config
from pagewire.shared.settings.config import FIELDS, Settings
from pagewire.shared.settings.environment import variable
from tests.fuzz.fuzzing import fuzz, mutated, texts, values

TOML = [
    b'model = "x"\nport = 80\nmax-num-seqs = 4\nprefix-cache = false\n[a]\nb = [1, {c = 2}]\n',
    b'seed = 0x10\ndtype = "auto"',
]
YAML = [b"model: x\nport: 80\nmax_num_seqs: 4\nprefix-cache: false\ncors-origins: [a, {b: 2}]\n"]
TOKENS = [b"=", b'"""', b"[[", b"\n", b"1979-05-27", b"1e999", b"'", b"nan", b"9" * 400, b"[" * 2000, b"a." * 2000]


def loads(given: dict[str, object], environ: dict[str, str], file: Path | None) -> None:
    try:
        settings = config.load(given, environ, file)
    except ConfigurationError as error:
        assert str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return
    again = config.load({}, config.to_environment(settings))
    assert msgspec.structs.astuple(again) == msgspec.structs.astuple(settings)


@pytest.mark.parametrize(("suffix", "samples"), [(".toml", TOML), (".yaml", YAML)])
def test_any_settings_file_is_read_or_refused(suffix: str, samples: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / f"pagewire{suffix}"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        loads({}, {}, file)

    known = [b"port = " + b"9" * 5000, b"port: " + b"9" * 5000, b"a: 2024-13-45", b"a = " + b"[" * 2000, b"[" * 2000]
    fuzz(mutated(samples, TOKENS), check, known, share=0.25)


def test_any_flag_or_variable_is_read_or_refused() -> None:
    names = st.sampled_from(sorted(FIELDS))
    words = st.one_of(
        texts, st.integers().map(str), st.sampled_from(["true", "1e3", "-1", "0x10", "NaN", "inf", " 1", "null"])
    )
    flags = st.dictionaries(st.one_of(names, texts), st.one_of(words, values), max_size=3)
    variables = st.dictionaries(names.map(variable), words, max_size=3)
    known: list[tuple[dict[str, object], dict[str, str]]] = [({}, {variable("kv-cache-memory"): "\n"})]
    fuzz(st.tuples(flags, variables), lambda given: loads(given[0], given[1], None), known, share=0.5)


def test_any_file_of_keys_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            keys = ApiKeys.load(file)
        except ConfigurationError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return
        assert all(len(key) >= api_keys.MIN_KEY for key in keys.passwords.values())
        assert keys.find(b"") is None

    fuzz(
        mutated([b"# keys\nalice:0123456789abcdef\n\nbob:fedcba9876543210\n"], [b":", b"\n", b"#", b"$"]),
        check,
        share=0.5,
    )


def test_the_default_settings_survive_the_environment() -> None:
    assert config.load({}, config.to_environment(Settings())) == Settings()
