"""Array annotations with shapes, such as `Float[Array, 'B N D']`: jaxtyping's, if installed.

Tests check them at every call. Without jaxtyping, an annotation is the bare array type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Float32 as Float32
    from jaxtyping import Int as Int
    from jaxtyping import Int64 as Int64
    from jaxtyping import Key as Key
    from jaxtyping import Num as Num
    from jaxtyping import Shaped as Shaped
    from jaxtyping import UInt8 as UInt8
else:
    try:
        from jaxtyping import Bool, Float, Float32, Int, Int64, Key, Num, Shaped, UInt8
    except ImportError:

        class Shaped:
            """`Shaped[Array, 'B N D']` is `Array`."""

            def __class_getitem__(cls, array_and_shape: tuple[Any, str]) -> Any:
                return array_and_shape[0]

        Bool = Float = Float32 = Int = Int64 = Key = Num = UInt8 = Shaped
