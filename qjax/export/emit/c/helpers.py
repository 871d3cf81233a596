"""Helper functions of emitted files: versions of arithmetic that are defined where C99 leaves it undefined.

A file contains only the helpers that it calls. gcc and clang compile `to_*` to nothing, and `sar_*`, `add_*` and others
to one instruction.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from qjax.export.emit.c import threads

_UNUSED = """\
#if defined(__clang__)
/* gcc does not warn of inline functions that a model does not call */
#pragma clang diagnostic ignored "-Wunused-function"
#endif"""

_NARROWING = """\
static inline int{n}_t to_i{n}(uint{n}_t x)
{{
    return x <= INT{n}_MAX ? (int{n}_t)x : (int{n}_t)((int32_t)x - {size});
}}"""

_TO = """\
static inline int{n}_t to_i{n}(uint{n}_t x)
{{
    return x <= INT{n}_MAX ? (int{n}_t)x : -(int{n}_t)(UINT{n}_MAX - x) - 1;
}}"""

_PAIR = """\
static inline int{n}_t {name}_i{n}(int{n}_t a, int{n}_t b)
{{
    return to_i{n}((uint{n}_t)a {sign} (uint{n}_t)b);
}}"""

_EXTREME = """\
static inline {type} {name}_{suffix}({type} a, {type} b)
{{
    return a {sign} b ? a : b;
}}"""

_SAR = """\
static inline int{n}_t sar_i{n}(int{n}_t x, int32_t places)
{{
    return x < 0 ? ~(~x >> places) : x >> places;
}}"""

_SHL = """\
static inline int{n}_t shl_i{n}(int{n}_t x, int32_t places)
{{
    return to_i{n}((uint{n}_t)x << places);
}}"""

_SHR = """\
static inline int{n}_t shr_i{n}(int{n}_t x, int32_t places)
{{
    return to_i{n}((uint{n}_t)x >> places);
}}"""

_ABS = """\
static inline int{n}_t abs_i{n}(int{n}_t x)
{{
    return x < 0 ? to_i{n}(0u - (uint{n}_t)x) : x;
}}"""

_SIGN = """\
static inline int{n}_t sign_i{n}(int{n}_t x)
{{
    return (int{n}_t)((x > 0) - (x < 0));
}}"""

_CLZ = """\
static inline {signed} clz_{suffix}({signed} x)
{{
    {unsigned} rest = ({unsigned})x;
#if defined(__GNUC__) || defined(__clang__)
    return ({signed})(rest == 0 ? {n} : __builtin_clzll((unsigned long long)rest) - {spare});
#else
    int32_t zeros = {n};
    int32_t step;
    for (step = {half}; step > 0; step /= 2) {{
        if ((rest >> step) != 0) {{
            zeros -= step;
            rest >>= step;
        }}
    }}
    return ({signed})(rest != 0 ? zeros - 1 : zeros);
#endif
}}"""

_DIV = """\
/* as XLA: by 0 it is -1, and the least number by -1 is itself */
static inline int{n}_t div_i{n}(int{n}_t a, int{n}_t b)
{{
    return b == 0 ? -1 : b == -1 ? to_i{n}(0u - (uint{n}_t)a) : a / b;
}}"""

_REM = """\
/* as XLA: by 0 it is the dividend */
static inline int{n}_t rem_i{n}(int{n}_t a, int{n}_t b)
{{
    return b == 0 ? a : b == -1 ? 0 : a % b;
}}"""

_UDIV = """\
/* as XLA: by 0 it is all ones */
static inline uint{n}_t div_u{n}(uint{n}_t a, uint{n}_t b)
{{
    return b == 0 ? UINT{n}_MAX : a / b;
}}"""

_UREM = """\
/* as XLA: by 0 it is the dividend */
static inline uint{n}_t rem_u{n}(uint{n}_t a, uint{n}_t b)
{{
    return b == 0 ? a : a % b;
}}"""


_CODE = """\
/* the code of {bits} bits, in two's complement, that begins at a number's lowest bit */
static inline int8_t int{bits}(int32_t x)
{{
    return (int8_t)(((x & {mask}) ^ {half}) - {half});
}}"""

_CODE_AT = """\
/* code i of those that are packed {many} to a byte, the first in the lowest bits */
static inline int8_t int{bits}_at(const uint8_t *codes, int32_t i)
{{
    return int{bits}(codes[i >> {log}] >> ((i & {last}) * {bits}));
}}"""


_FLOATS = """\
#include <float.h>
#include <math.h>
#if defined(__FAST_MATH__) || (FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16)
#error "the float parts need IEEE 754 arithmetic in float: no -ffast-math, and SSE rather than x87 on 32-bit x86"
#endif"""

_OF_FLOATS = {
    "max": """\
/* as XLA: NaN where one is NaN */
static inline float max_f32(float a, float b)
{
    return a != a ? a : b != b ? b : a > b ? a : b;
}""",
    "min": """\
/* as XLA: NaN where one is NaN */
static inline float min_f32(float a, float b)
{
    return a != a ? a : b != b ? b : a < b ? a : b;
}""",
    "abs": """\
static inline float abs_f32(float x)
{
    return x < 0.0f ? -x : x + 0.0f;
}""",
    "sign": """\
static inline float sign_f32(float x)
{
    return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x;
}""",
    "is_finite": """\
static inline int is_finite_f32(float x)
{
    return x - x == 0.0f;
}""",
    "round": """\
/* to the nearest whole number, ties to even: from 2^23 on every float is one */
static inline float round_f32(float x)
{
    const float whole = 8388608.0f;
    if (!(x < whole && x > -whole)) {
        return x;
    }
    return x < 0.0f ? (x - whole) + whole : (x + whole) - whole;
}""",
    "floor": """\
static inline float floor_f32(float x)
{
    const float near = round_f32(x);
    return near > x ? near - 1.0f : near;
}""",
    "ceil": """\
static inline float ceil_f32(float x)
{
    const float near = round_f32(x);
    return near < x ? near + 1.0f : near;
}""",
    "to_int": """\
/* as XLA: the nearest end of int32 for what lies beyond, 0 for NaN */
static inline int32_t to_int_f32(float x)
{
    return x != x ? 0 : x >= 2147483648.0f ? INT32_MAX : x <= -2147483648.0f ? INT32_MIN : (int32_t)x;
}""",
}


def _all() -> dict[str, tuple[str, tuple[str, ...]]]:
    """name -> (text, names of the helpers that it calls)."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for n in (8, 16):
        found[f"to_i{n}"] = (_NARROWING.format(n=n, size=2**n), ())
    for n in (32, 64):
        to = (f"to_i{n}",)
        found[f"to_i{n}"] = (_TO.format(n=n), ())
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
            found[f"{name}_i{n}"] = (_PAIR.format(n=n, name=name, sign=sign), to)
        for name, text in (("shl", _SHL), ("shr", _SHR), ("abs", _ABS), ("div", _DIV)):
            found[f"{name}_i{n}"] = (text.format(n=n), to)
        for name, text in (("sar", _SAR), ("sign", _SIGN), ("rem", _REM)):
            found[f"{name}_i{n}"] = (text.format(n=n), ())
        found[f"div_u{n}"] = (_UDIV.format(n=n), ())
        found[f"rem_u{n}"] = (_UREM.format(n=n), ())
        for letter, signed in (("i", f"int{n}_t"), ("u", f"uint{n}_t")):
            text = _CLZ.format(
                n=n, half=n // 2, spare=64 - n, signed=signed, unsigned=f"uint{n}_t", suffix=f"{letter}{n}"
            )
            found[f"clz_{letter}{n}"] = (text, ())
        for suffix, kind in ((f"i{n}", f"int{n}_t"), (f"u{n}", f"uint{n}_t")):
            for name, sign in (("max", ">"), ("min", "<")):
                found[f"{name}_{suffix}"] = (_EXTREME.format(type=kind, name=name, suffix=suffix, sign=sign), ())
    for n, many in ((2, "four"), (4, "two")):
        found[f"int{n}"] = (_CODE.format(bits=n, mask=2**n - 1, half=2 ** (n - 1)), ())
        found[f"int{n}_at"] = (_CODE_AT.format(bits=n, many=many, last=8 // n - 1, log=4 // n), (f"int{n}",))
    found["floats"] = (_FLOATS, ())
    for name, text in _OF_FLOATS.items():
        found[f"{name}_f32"] = (text, ("floats", *(("round_f32",) if name in ("floor", "ceil") else ())))
    found["threads"] = (threads.MACRO, ())
    found["unused"] = (_UNUSED, ())
    return found


_TEXTS = _all()


def helper_texts(names: Iterable[str], more: Mapping[str, tuple[str, tuple[str, ...]]]) -> list[str]:
    """The definitions of some helpers and of those that they call, in an order that compiles.

    more: `Vectors.helpers`, which come last.
    """
    texts = {**_TEXTS, **more}
    order = list(texts)
    wanted: set[str] = set()
    for name in names:
        if name not in texts:
            raise AssertionError(f"no helper {name!r}")
        wanted |= {name, *texts[name][1]}
    return [texts[name][0] for name in sorted(wanted, key=order.index)]


_FUNCTION = re.compile(
    r"^(?:/\*(?:[^*]|\*(?!/))*\*/\n)?static inline [^\n;{}]*?\b(\w+)\((?:[^;{}]*?)\)\n\{\n(?:.*\n)*?\}\n*", re.MULTILINE
)
"""A function as the helpers write it: an optional comment, its head, and a body up to the brace in the first column."""


def without_unused(helpers: Iterable[str], others: Iterable[str]) -> list[str]:
    """The helpers without the functions to which neither `others` nor the remaining helpers refer."""
    texts, rest = list(helpers), "\n".join(others)
    while True:
        found = [match for text in texts for match in _FUNCTION.finditer(text)]
        # a name may have a body for each kind of processor, and none of them counts as a use of it
        bodies: dict[str, str] = {}
        for match in found:
            bodies[match[1]] = bodies.get(match[1], "") + match[0]
        every = Counter(re.findall(r"\w+", "\n".join([*texts, rest])))
        unused = {name for name, body in bodies.items() if every[name] == re.findall(r"\w+", body).count(name)}
        if not unused:
            return texts
        for match in found:
            if match[1] in unused:
                texts = [text.replace(match[0], "") for text in texts]
        texts = [text.rstrip("\n") for text in texts if text.strip()]
