import asyncio
import errno
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pagewire import LLM, AsyncClient, cli
from pagewire.commands import doctor, generate, parser, session
from pagewire.shared.errors import BusUnavailable, ConfigurationError
from pagewire.shared.models.model_folder import BUNDLED, served_names
from pagewire.shared.settings import config, flags
from pagewire.shared.settings.config import FIELDS, Settings
from pagewire.shared.settings.environment import variable
from tests.pagewire.serving import run
from tests.support.broker import plain_server
from tests.support.waiting import PATIENCE


def models_of(*arguments: str) -> list[Settings]:
    return flags.read_models(parser.build_parser().parse_args(["serve", *arguments]))


def settings_of(*arguments: str) -> Settings:
    (settings,) = models_of(*arguments)
    return settings


def test_the_promised_flags_are_there() -> None:
    promised = (
        "--served-model-name --host --port --device --dtype --max-model-len --max-num-seqs --max-num-batched-tokens "
        "--block-size --kv-cache-memory --gpu-memory-utilization --tensor-parallel-size --data-parallel-size --seed "
        "--api-key --lease-window --num-scheduler-steps --nats-url --nats-port --log-format --trace-dir --config"
    )
    helped = run("serve", "--help")
    assert helped.returncode == 0
    assert all(flag in helped.stdout for flag in promised.split())


def test_every_setting_has_a_flag_with_help() -> None:
    lines = flags.describe(Settings)
    assert set(lines) == {field.name for field in FIELDS.values()}
    assert all(lines.values())


def test_flags_beat_the_environment_and_the_environment_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "pagewire.toml"
    config.write_text("max-num-seqs = 1\nblock-size = 8\nlease-window = 2\n")
    monkeypatch.setenv(variable("max-num-seqs"), "3")
    monkeypatch.setenv(variable("block-size"), "32")
    settings = settings_of("--config", str(config), "--max-num-seqs", "5")
    assert (settings.max_num_seqs, settings.block_size, settings.lease_window) == (5, 32, 2)


def test_the_model_is_an_argument_and_a_flag() -> None:
    assert settings_of().model == ""
    assert settings_of("folder").model == "folder"
    assert settings_of("--model", "folder").model == "folder"


def test_several_names_leave_the_model_its_argument() -> None:
    for arguments in (["folder", "--served-model-name", "a", "b"], ["--served-model-name", "a", "b", "folder"]):
        settings = settings_of(*arguments)
        assert (settings.model, served_names(settings)) == ("folder", ["a", "b"])
    settings = settings_of("--served-model-name", "a", "b", "--model", "folder")
    assert (settings.model, served_names(settings)) == ("folder", ["a", "b"])
    assert settings_of("--served-model-name", "a").served_model_name == "a"


def test_several_models_are_arguments_and_share_the_settings() -> None:
    first, second = models_of("a", "b", "--max-num-seqs", "3", "--served-model-name", "x", "y")
    assert [(each.model, each.served_model_name, each.max_num_seqs) for each in (first, second)] == [
        ("a", "x", 3),
        ("b", "y", 3),
    ]
    with pytest.raises(ConfigurationError, match="1 names for 2 models"):
        models_of("a", "b", "--served-model-name", "x")


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("4GiB", 4 << 30), ("4G", 4 << 30), ("1.5k", 1500), ("2GB", 2 * 10**9)]
)
def test_sizes_may_have_a_unit(text: str, size: int) -> None:
    assert settings_of("--kv-cache-memory", text).kv_cache_memory == size
    assert settings_of("--kv-cache-memory-bytes", text).kv_cache_memory == size


@pytest.mark.parametrize(
    ("text", "reason"),
    [("4GiBs", "kv-cache-memory must be a whole number"), ("1.5", "as in 4GiB"), ("", "as in 4GiB"), ("-4", ">= 1")],
)
def test_an_invalid_size_is_refused_by_name(text: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", f"--kv-cache-memory={text}"]) == 2
    error = capsys.readouterr().err
    assert "kv-cache-memory" in error
    assert reason in error


def test_the_context_may_be_automatic() -> None:
    assert settings_of("--max-model-len", "auto").max_model_len is None
    assert settings_of("--max-model-len", "4k").max_model_len == 4000


def test_a_file_may_be_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "vllm.yaml"
    config.write_text("model: folder\nmax_num_seqs: 3\nserved-model-name: [a, b]\n")
    settings = settings_of("--config", str(config))
    assert (settings.model, settings.max_num_seqs, served_names(settings)) == ("folder", 3, ["a", "b"])
    config.write_text("a: [")
    assert cli.main(["serve", "--config", str(config)]) == 2
    assert "is not YAML" in capsys.readouterr().err


def test_the_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser.build_parser().parse_args(["serve", "--help"])
    assert "(default: 8000)" in " ".join(capsys.readouterr().out.split())


def test_a_client_without_arguments_uses_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("nats-url"), "nats://127.0.0.1:1")

    async def connect() -> None:
        async with AsyncClient(connect_timeout=0.2):
            pass

    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1"):
        asyncio.run(connect())


def test_a_client_without_a_key_is_the_nats_user_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*arguments: str, **options: str) -> None:
        async with AsyncClient(*arguments, **options):  # type: ignore[arg-type]
            pass

    login = ["--user", "all", "--pass", "p@ss"]
    with plain_server(["-a", "127.0.0.1", "-p", "-1", *login], dict(os.environ)) as server:
        for name, value in {"nats-url": server, "nats-user": "all", "nats-password": "p@ss"}.items():
            monkeypatch.setenv(variable(name), value)
        asyncio.run(connect())
        with pytest.raises(ConfigurationError, match="refuses these credentials"):
            asyncio.run(connect(server, api_key="another"))
        assert cli.main(["status"]) == 1


def test_vllms_old_name_sets_the_lease_window() -> None:
    assert settings_of("--num-scheduler-steps", "4").lease_window == 4
    assert not settings_of("--no-prefix-cache").prefix_cache


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--max-num-seqs", "0"], "max-num-seqs"),
        (["serve", "--max-queue-wait", "10"], "max-queue-wait"),
        (["serve", "--max-num-seqs", "1000000000"], "max-num-seqs"),
        (["serve", "--num-kv-blocks", "100000000"], "num-kv-blocks"),
        (["serve", "--nats-cluster", "2"], "nats-cluster"),
        (["serve", "--nats-replicas", "3"], "nats-replicas 3 needs 3 servers"),
        (["serve", "--nats-cluster", "3", "--nats-replicas", "5"], "nats-replicas 5 needs 5 servers"),
        (["serve", "--nats-cluster", "3", "--nats-port", "65534"], "set nats-port to at most 65533"),
        (["serve", "--nats-cluster", "3", "--nats-url", "nats://127.0.0.1:1"], "set one of them"),
        (["status", "--nats-url", "nats://127.0.0.1:1,nats://127.0.0.1:2"], "127.0.0.1:1, 127.0.0.1:2"),
        (["status", "--nats-url", "nats://127.0.0.1:1,"], "is not the address of a NATS server"),
        (["serve", "--config", "/nowhere.toml"], "cannot read the configuration"),
        (["serve", "--model", "bundled", "--api-key-file", "/nowhere"], "cannot read api-key-file /nowhere"),
        (["serve", "--nats-tls-ca", "ca.crt"], "--nats-url"),
        (["serve", "--nats-secrets", "folder"], "--nats-url"),
        (
            ["serve", "--model", "bundled", "--nats-url", "nats://127.0.0.1:1", "--nats-secrets", "/nowhere"],
            "NATS password of supervisor",
        ),
        (["generate", "x", "--tenant", "alice"], "needs its key"),
        (["generate", "x", "--nats-tls-ca", "/nowhere"], "nats-tls-ca"),
        (["nats-config", "--api-key-file", "/nowhere"], "cannot read api-key-file /nowhere"),
        (["trace", "r1"], "--trace-dir"),
        (["trace", "r1", "--trace-dir", "/nowhere"], "no spans of request r1"),
        (["status", "--nats-url", "nats://127.0.0.1:1"], "127.0.0.1:1"),
        (["generate", "x", "--nats-url", "nats://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("pagewire: ")
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_missing_folder_ends_serve_with_one_line() -> None:
    done = run("serve", "/nowhere/at/all", "--port", "0", "--nats-port", "0", "--log-level", "error")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is no folder /nowhere/at/all" in done.stderr
    assert done.stdout == ""


def test_an_unknown_model_ends_serve_with_one_line(tmp_path: Path) -> None:
    for file in BUNDLED.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    config = {"architectures": ["UnheardOfForCausalLM"], "max_position_embeddings": 64, "vocab_size": 3072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("serve", str(tmp_path), "--port", "0", "--nats-port", "0", "--log-level", "error")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "architecture UnheardOfForCausalLM is not supported" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--trace-dir", "/proc/nowhere", "trace-dir /proc/nowhere cannot be written to"),
        ("--num-kv-blocks", "16000000", "num-kv-blocks gives 16000000 KV blocks"),
    ],
)
def test_a_setting_that_a_service_refuses_ends_serve_with_the_reason(flag: str, value: str, reason: str) -> None:
    done = run("serve", "bundled", "--port", "0", "--nats-port", "0", "--log-level", "error", flag, value)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert done.stdout == ""


def test_offline_generation_names_the_reason_of_a_service() -> None:
    with pytest.raises(ConfigurationError, match="trace-dir /proc/nowhere cannot be written to"):
        LLM("bundled", trace_dir="/proc/nowhere")


def test_a_configured_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run("serve", "bundled", "--port", "0", "--nats-port", str(port), "--log-level", "error")
    assert done.returncode == 2
    assert done.stderr == f"pagewire: nats-port {port} is in use: set another one, or 0 for any free port\n"


def test_doctor_names_each_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--model", str(tmp_path), "--nats-url", "nats://127.0.0.1:1"]) == 1
    output = capsys.readouterr().out
    assert f"FAILED model: {tmp_path} has no config.json" in output
    assert "FAILED connection:" in output
    assert cli.main(["doctor", "--max-num-seqs", "none"]) == 1
    assert "FAILED settings" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["flashinfer", "FLASHINFER"])
def test_doctor_checks_flashinfer_only_if_it_is_configured(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "FlashInfer" not in dict(doctor.checks(Settings(device="cuda")))
    checks = dict(doctor.checks(config.load({"device": "cuda", "attention-backend": backend}, {})))
    with pytest.raises(ConfigurationError, match="pip install flashinfer-python"):
        checks["FlashInfer"]()


def test_the_version_and_the_help_are_printed() -> None:
    assert run("--version").stdout.startswith("pagewire ")
    helped = run("--help").stdout
    assert all(name in helped for name in parser.COMMANDS)
    assert run().returncode == 2


@pytest.mark.parametrize("command", [["models"], ["completion", "bash"], ["--version"], ["--help"]])
def test_an_output_that_cannot_be_written_ends_without_a_traceback(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pagewire", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert command == ["--help"] or (done.returncode, done.stderr) == (2, "pagewire: No space left on device\n")


def test_a_full_temporary_folder_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/pagewire-x")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert cli.main(["demo", "--model", "bundled"]) == 2
    assert capsys.readouterr().err == "pagewire: No space left on device: /tmp/pagewire-x\n"


def test_a_text_comes_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(generate, "_generate", lambda text, *_, **__: texts.append(text))
    monkeypatch.setattr(session, "run", lambda *_: 0)
    for arguments in ([], ["-"], ["words"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon\xc3\xa9\n")))
        assert cli.main(["generate", *arguments]) == 0
    assert texts == ["Once upon\xe9", "Once upon\xe9", "words"]


def test_generate_without_a_text_asks_for_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["generate"]) == 2
    assert "give TEXT" in capsys.readouterr().err


def test_doctor_needs_no_weights_of_a_dummy_model_nor_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((BUNDLED / "config.json").read_text())
    flags = ["--load-format", "dummy", "--tokenizer", "bundled", "--nats-url", "nats://127.0.0.1:1"]
    assert cli.main(["doctor", "--model", str(tmp_path), *flags]) == 1
    assert "FAILED model" not in capsys.readouterr().out
