"""Constants shared by the JSON kernels and their callers: statuses and sizes.

The kernels are compiled with the same values, from the .pxd beside this module.
"""

from __future__ import annotations

OK, MALFORMED, TOO_DEEP, FULL, UNSUPPORTED = range(5)
"""Status of a value. FULL: retry the value with a larger `out`. UNSUPPORTED: only `json_plain` can write the value."""

DECIMAL_DIGITS_MAX = 38
"""Maximum number of digits before 3.5. Longer decimals, and larger scales, are left to the plain formatter."""

EXTENSION_TEXT_MAX = 2 * DECIMAL_DIGITS_MAX + 16
"""Maximum size of the text of an extension value."""

ROOM = EXTENSION_TEXT_MAX + 20
"""Free bytes that each step requests before it writes: enough for any scalar except str and bin, which get more."""
