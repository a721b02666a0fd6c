"""The interpreter of PTX: what a kernel does wrong is found, and what the interpreter does not know is refused."""

import numpy as np
import ptx_interpreter
import pytest

# One block of two warps; %rd1 is an input of 64 words, %rd2 an output of as many, %rd3 and %rd4 a thread's words there,
# %r4 its word of shared memory and %r5 that of the thread whose lane is the opposite one.
KERNEL = """.visible .entry kernel(
	.param .u64 .ptr .align 256 kernel_param_0,
	.param .u64 .ptr .align 256 kernel_param_1
)
.maxntid 64, 1, 1
{{
	ld.param::entry.b64 %rd1, [kernel_param_0];
	ld.param::entry.b64 %rd2, [kernel_param_1];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd2, %rd3;
	add.s64 %rd3, %rd1, %rd3;
	ld.global.nc.b32 %r2, [%rd3];
	mov.b64 %rd5, __dynamic_shmem__0;
	cvt.u32.u64 %r3, %rd5;
	mad.lo.s32 %r4, %r1, 4, %r3;
	xor.b32 %r5, %r1, 31;
	mad.lo.s32 %r5, %r5, 4, %r3;
	setp.lt.u32 %p1, %r1, 32;
	{body}
	ret;
$L__func_end0:
}}
"""
STORE = "st.global.b32 [%rd4], %r2;"
EXCHANGE = "st.shared.b32 [%r4], %r2; {between} ld.shared.b32 %r2, [%r5]; " + STORE
GIVEN = np.arange(100, 164, dtype=np.int32)


def run(body: str, shared_words: int = 64) -> ptx_interpreter.Output:
    launch = ptx_interpreter.Launch(1, shared_words, parameters=[0, 1])
    (output,) = ptx_interpreter.run(KERNEL.format(body=body), [GIVEN], [64], launch)
    return output


OF_OTHER_WARP = "bar.sync 0; xor.b32 %r5, %r5, 128;"
OF_EACH_WARP = "shr.u32 %r6, %r1, 5; add.s32 %r6, %r6, 1; bar.sync %r6, 32;"  # a barrier of its own


@pytest.mark.parametrize("between", ["bar.sync 0;", "bar.sync 3, 64;", OF_EACH_WARP, "bar.warp.sync 0xffffffff;"])
def test_lanes_exchange_words_over_a_barrier(between: str) -> None:
    words, written = run(EXCHANGE.format(between=between))
    assert written.all()
    np.testing.assert_array_equal(words, GIVEN[np.arange(64) ^ 31])


def test_a_word_that_no_barrier_brought_is_garbage() -> None:
    np.testing.assert_array_equal(run(EXCHANGE.format(between="")).words, ptx_interpreter.GARBAGE)


@pytest.mark.parametrize("between", [OF_EACH_WARP, "bar.warp.sync 0xffffffff;"])
def test_a_word_of_another_warp_is_garbage_where_warps_do_not_meet(between: str) -> None:
    opposite = "xor.b32 %r5, %r1, 63; mad.lo.s32 %r5, %r5, 4, %r3;"
    np.testing.assert_array_equal(run(opposite + EXCHANGE.format(between=between)).words, ptx_interpreter.GARBAGE)
    np.testing.assert_array_equal(run(opposite + EXCHANGE.format(between="bar.sync 0;")).words, GIVEN[::-1])


def test_matrices_are_turned() -> None:
    """Four matrices a warp, whose columns are 0 1 2 .., 8 9 10 .. and so on; a lane has the second word of a row, which
    is its third and fourth column."""
    numbers = "and.b32 %r6, %r1, 31; mad.lo.s32 %r6, %r6, 0x20002, 0x10000;"
    later = " ".join(f"add.s32 %r{6 + m}, %r{5 + m}, 0x400040;" for m in (1, 2, 3))
    row = "mad.lo.s32 %r4, %r1, 16, %r3;"
    turn = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r4], {%r6, %r7, %r8, %r9};"
    load = "bar.warp.sync 0xffffffff; ld.shared.v4.b32 {%r6, %r2, %r7, %r8}, [%r4];"
    words = run(numbers + later + row + turn + load + STORE, shared_words=256).words
    lane = np.arange(64) % 32
    third = 64 * (lane // 8) + 16 + lane % 8
    np.testing.assert_array_equal(words, third | (third + 8) << 16)


def test_bytes_are_stored_alone() -> None:
    words, written = run("st.global.u8 [%rd4+2], %r2;")
    np.testing.assert_array_equal(written, np.broadcast_to(np.arange(4) == 2, (64, 4)))
    np.testing.assert_array_equal(words >> 16 & 0xFF, GIVEN)


def test_warps_take_ways_of_their_own_and_meet_again() -> None:
    """The first of them goes three times round a loop, whose end both reach."""
    body = f"""@!%p1 bra $L_end; mov.b32 %r6, 0;
$L_loop: add.s32 %r2, %r2, 10; add.s32 %r6, %r6, 1; setp.lt.s32 %p2, %r6, 3; @%p2 bra $L_loop;
$L_end: {STORE}"""
    np.testing.assert_array_equal(run(body).words, GIVEN + np.where(np.arange(64) < 32, 30, 0))


def test_only_lanes_of_a_guard_store() -> None:
    np.testing.assert_array_equal(run(f"@!%p1 {STORE}").written.all(1), np.arange(64) >= 32)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.nc.b32 %r2, [%rd3+4];", "beyond the end of an array"),
        ("ld.global.nc.b32 %r2, [%rd3+-4];", "not within an array|beyond the end"),
        ("ld.global.nc.v2.b32 {%r6, %r7}, [%rd3];", "misaligned"),
        ("ld.global.nc.b32 %r2, [%rd4];", "a load of an output"),
        ("st.global.b32 [%rd3], %r2;", "a store to an input"),
        (STORE + STORE, "stored twice"),
        ("st.global.b32 [%rd2], %r2;", "stored twice"),
        ("ld.shared.b32 %r2, [%r4];", "nobody wrote"),
        ("st.shared.b32 [%r3], %r2;", "two lanes store"),
        ("st.shared.b32 [%r4], %r2; st.shared.b32 [%r5], %r2;", "with no barrier between"),
        ("st.shared.b32 [%r4+4], %r2;", "beyond the end of shared memory"),
        (EXCHANGE.format(between=OF_OTHER_WARP) + "st.shared.b32 [%r4], %r2;", "another warp read"),
        ("st.global.u8 [%rd4+1], %r2;" + STORE, "stored twice"),
        ("bar.sync 1, 32;", "more warps meet than should"),
        ("@%p1 bra $L_end; bar.sync 1, 64; ret; $L_end: bar.sync 1, 32;", "disagree"),
        ("setp.eq.s32 %p2, %r1, 0; @%p2 bra $L_end; $L_end: ret;", "lanes of a warp part"),
        ("@%p1 bra $L_end; bar.sync 0; $L_end: ret;", "others never reach"),
        ("$L_loop: bra $L_loop;", "does not end"),
    ],
)
def test_what_a_gpu_would_let_pass_is_found(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_interpreter, "MOST_STEPS", 100)
    with pytest.raises(AssertionError, match=message):
        run(body)


@pytest.mark.parametrize(
    "instruction",
    [
        "prmt.b32 %r2, %r2, %r2, 0;",
        "add.f32 %r2, %r2, %r2;",
        "cvt.s64.s32 %rd6, %r2;",
        "atom.global.add.u32 %r2, [%rd4], 1;",
        "ld.global.b16 %rs1, [%rd3];",
        "shl.b64 %rd6, %rd1, 32;",
        "redux.sync.add.u32 %r2, %r2, 0x0000ffff;",
        "redux.sync.add.s32 %r2, %r2, 0xffffffff;",
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4], {%r2, %r2, %r2, %r2};",
        "bar.arrive 1, 64;",
        "@%p1 ret;",
    ],
)
def test_what_is_not_known_is_refused(instruction: str) -> None:
    with pytest.raises(NotImplementedError):
        run(instruction)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("shr.s32 %r2, -8, 1;", -4),
        ("shr.u32 %r2, -8, 1;", 0x7FFF_FFFC),
        ("max.s32 %r2, -8, 1;", 1),
        ("max.u32 %r2, -8, 1;", -8),
        ("mul.hi.u32 %r2, -1, 10;", 9),
        ("mul.hi.u64 %rd6, -1, -1; cvt.u32.u64 %r2, %rd6;", -2),
        ("mul.lo.s16 %rs1, 300, 300; cvt.u32.u16 %r2, %rs1;", 300 * 300 % 65536),
        ("bfe.u32 %r2, 0x1234, 4, 8;", 0x23),
        ("popc.b32 %r2, -1;", 32),
        ("redux.sync.min.u32 %r2, 7, 0xffffffff;", 7),
        ("shfl.sync.bfly.b32 %r2, %r1, 3, 31, 0xffffffff; xor.b32 %r2, %r2, %r1;", 3),
        ("fma.rn.f32 %r2, 0f40000000, 0f40400000, 0f3F800000;", 0x40E0_0000),
        ("add.rn.f32 %r2, 0f40000000, 0f40400000;", 0x40A0_0000),
        ("mul.rn.f32 %r2, 0f40000000, 0f40400000;", 0x40C0_0000),
        ("div.rn.f32 %r2, 0f3F800000, 0f40400000;", 0x3EAA_AAAB),
        ("rsqrt.approx.f32 %r2, 0f40800000;", 0x3F00_0000),
        ("cvt.rn.bf16x2.f32 %r2, 0f3F808000, 0f3F818000;", 0x3F80_3F82),
        ("mul.hi.u16 %rs1, 40000, 3; cvt.u32.u16 %r2, %rs1;", 1),
        ("max.u16x2 %r2, 0x00018000, 0x00027FFF;", 0x0002_8000),
        ("tanh.approx.f32 %r2, 0f3F800000;", 0x3F42_F7D6),
        ("ex2.approx.ftz.f32 %r2, 0fC0000000;", 0x3E80_0000),
        ("rcp.approx.ftz.f32 %r2, 0f7F000000;", 0),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, 0f447A0000, 0fBF800000; cvt.u32.u16 %r2, %rs1;", 0x7EB8),
        ("mov.b16 %rs1, 3; mov.b16 %rs2, 5; mov.b32 %r2, {%rs1, %rs2};", 0x0005_0003),
        ("not.b32 %r2, 5;", -6),
        ("setp.lt.s32 %p2, -1, 1; setp.lt.u32 %p3, -1, 1; xor.pred %p2, %p2, %p3; selp.b32 %r2, 3, 4, %p2;", 3),
        ("ld.b64 %rd6, [%rd1+8]; mov.b64 {%r6, %r7}, %rd6; sub.s32 %r2, %r7, %r6;", 1),
        ("ld.b64 %rd6, [%rd1+8]; mov.b64 {%r2, %r7}, %rd6;", 102),
        ("{ .reg .b32 word<2>; mov.b32 word1, 6; mov.b32 %r2, word1; }", 6),
    ],
)
def test_arithmetic(instruction: str, expected: int) -> None:
    np.testing.assert_array_equal(run(instruction + STORE).words.view(np.int32), expected)
