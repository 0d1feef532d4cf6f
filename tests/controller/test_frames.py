import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.errors import ProtocolError
from controller.frames import (
    MAX_NOISE_BYTES,
    Append,
    Beat,
    Frame,
    FrameDecoder,
    Hello,
    Refusal,
    Replace,
)
from remote_payload import rundir

NONCE = "0123456789abcdef"
HELLO = {"frame": "hello", "protocol": 1, "schema": 1, "run": "r1", "boot_id": "b", "t": 5.0}


def line(record: object) -> bytes:
    return json.dumps(record).encode() + b"\n"


def append(file: str, offset: int, data: bytes, generation: int = 1) -> bytes:
    header = {"frame": "append", "file": file, "generation": generation, "offset": offset}
    return line(header | {"size": len(data)}) + data


def replace(file: str, data: bytes, sequence: int = 1) -> bytes:
    return line({"frame": "replace", "file": file, "sequence": sequence, "size": len(data)}) + data


def stream(*parts: bytes, noise: bytes = b"") -> bytes:
    return noise + NONCE.encode() + b"\n" + line(HELLO) + b"".join(parts)


def decode(data: bytes, sizes: list[int] | None = None) -> list[Frame]:
    decoder = FrameDecoder(NONCE)
    frames: list[Frame] = []
    position = 0
    for size in sizes or []:
        frames += decoder.feed(data[position : position + size])
        position += size
    return [*frames, *decoder.feed(data[position:])]


def joined(frames: list[Frame]) -> list[Frame]:
    """Neighbouring pieces of one file as one."""
    whole: list[Frame] = []
    for frame in frames:
        last = whole[-1] if whole else None
        if (
            isinstance(frame, Append)
            and isinstance(last, Append)
            and (last.file, last.generation) == (frame.file, frame.generation)
            and last.offset + len(last.data) == frame.offset
        ):
            whole[-1] = Append(last.file, last.generation, last.offset, b"".join((last.data, frame.data)))
        else:
            whole.append(frame)
    return whole


def test_frames_of_every_kind_are_decoded() -> None:
    beat = {
        "frame": "beat", "t": 7.5, "mono": 1.0, "boot_id": "b", "supervisor": "alive", "trainer": "gone",
        "files": {"train.log": {"generation": 2, "size": 9, "inode": 77}},
    }  # fmt: skip
    frames = decode(
        stream(
            append("train.log", 4, b"a\nframe\n", 2),
            replace("status.json", b"{}"),
            replace("exit.json", b""),
            line(beat),
            line({"frame": "error", "text": "disk on fire"}),
        )
    )
    assert frames == [
        Hello("r1"),
        Append("train.log", 2, 4, b"a\nframe\n"),
        Replace("status.json", 1, b"{}"),
        Replace("exit.json", 1, b""),
        Beat(7.5, "alive", "gone", {"train.log": (2, 9)}, {"train.log": 77}, beat),
        Refusal("disk on fire"),
    ]


def test_login_noise_before_the_nonce_is_kept_for_diagnosis_and_no_frame() -> None:
    noise = b"Welcome!\n" + line(HELLO) + b"\xff\x00 no newline at its end"
    decoder = FrameDecoder(NONCE)
    frames = list(decoder.feed(stream(noise=noise)))
    assert [type(frame) for frame in frames] == [Hello]
    assert decoder.noise == noise


def test_a_login_that_never_stops_talking_is_refused() -> None:
    decoder = FrameDecoder(NONCE)
    with pytest.raises(ProtocolError, match="login printed more"):
        for _ in range(2 + MAX_NOISE_BYTES // 65536):
            assert list(decoder.feed(b"x" * 65536)) == []


@given(
    bodies=st.lists(st.binary(max_size=300), max_size=6),
    sizes=st.lists(st.integers(0, 200), max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_the_borders_of_chunks_do_not_matter(bodies: list[bytes], sizes: list[int]) -> None:
    offset, parts = 0, []
    for body in bodies:
        parts += [append("events.jsonl", offset, body), replace("progress.json", body)]
        offset += len(body)
    data = stream(*parts, noise=b"motd")
    assert joined(decode(data, sizes)) == joined(decode(data))
    small = [frame for frame in decode(data, sizes) if isinstance(frame, Replace)]
    assert [frame.data for frame in small] == bodies


def test_bytes_of_a_frame_that_a_break_cuts_in_two_are_not_lost() -> None:
    data = stream(append("train.log", 0, b"x" * 1000))
    frames = decode(data[:-400])
    assert joined(frames)[-1] == Append("train.log", 1, 0, b"x" * 600)


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "crash/../../x", "mirror.json", "place.json", "crash/", "crash/.x",
     "control/stop", "train.log\n", "", None, 7, "crash/" + "a" * 300],
)  # fmt: skip
def test_a_file_outside_of_the_contract_is_refused(name: object) -> None:
    header = {"frame": "append", "file": name, "generation": 1, "offset": 0, "size": 1}
    with pytest.raises(ProtocolError, match="may not"):
        decode(stream(line(header) + b"x"))


def test_a_small_file_cannot_be_appended_to_and_a_log_not_replaced() -> None:
    with pytest.raises(ProtocolError):
        decode(stream(append("status.json", 0, b"x")))
    with pytest.raises(ProtocolError):
        decode(stream(replace("train.log", b"x")))


@pytest.mark.parametrize(
    ("key", "value"),
    [("size", rundir.MAX_FRAME_BYTES + 1), ("size", -1), ("size", "3"), ("size", True), ("size", 1.0),
     ("offset", -1), ("offset", 1 << 70), ("generation", 0), ("generation", None)],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(key: str, value: object) -> None:
    header = {"frame": "append", "file": "train.log", "generation": 1, "offset": 0, "size": 1}
    with pytest.raises(ProtocolError, match=key):
        decode(stream(line(header | {key: value}) + b"x"))


@pytest.mark.parametrize("key", ["protocol", "schema"])
def test_another_version_is_refused_by_name(key: str) -> None:
    with pytest.raises(ProtocolError, match=f"{key} version 2, this dflashctl speaks 1"):
        decode(NONCE.encode() + b"\n" + line(HELLO | {key: 2}))


@pytest.mark.parametrize("garbage", [b"{", b"[1]\n", b"\xff\n", b"\n", b'{"frame":3}\n', b"x" * 300_000])
def test_garbage_after_hello_is_refused_or_waited_for_but_never_a_crash(garbage: bytes) -> None:
    if garbage == b"{":
        assert [type(frame) for frame in decode(stream(garbage))] == [Hello]
    else:
        with pytest.raises(ProtocolError):
            decode(stream(garbage))


def test_frames_before_hello_are_refused_but_an_error_is_heard() -> None:
    with pytest.raises(ProtocolError, match="before hello"):
        decode(NONCE.encode() + b"\n" + append("train.log", 0, b"x"))
    assert decode(NONCE.encode() + b"\n" + line({"frame": "error", "text": "no"})) == [Refusal("no")]


@pytest.mark.parametrize("t", ["NaN", "Infinity", "1e400", "true", '"now"', "[]", "null"])
def test_a_time_that_is_none_is_not_known(t: str) -> None:
    beat = decode(stream(b'{"frame":"beat","t":%s,"files":{}}\n' % t.encode()))[-1]
    assert isinstance(beat, Beat)
    assert beat.t is None


def test_a_frame_kind_of_a_later_feed_is_passed_over_with_its_bytes() -> None:
    later = line({"frame": "novel", "size": 5}) + b"\n{}\n\n"
    frames = decode(stream(later, line({"frame": "other"}), append("train.log", 0, b"x")))
    assert frames[1:] == [Append("train.log", 1, 0, b"x")]


def test_a_beat_may_name_a_file_that_we_do_not_know_but_not_an_impossible_size() -> None:
    good = {"frame": "beat", "files": {"novel.bin": 3, "gpu.jsonl": {"generation": 1, "size": 0}}}
    beat = decode(stream(line(good)))[-1]
    assert isinstance(beat, Beat)
    assert beat.files == {"gpu.jsonl": (1, 0)}
    with pytest.raises(ProtocolError):
        decode(stream(line({"frame": "beat", "files": {"gpu.jsonl": {"generation": 1, "size": -3}}})))
