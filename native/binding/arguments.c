#include "module.h"

#include <math.h>
#include <string.h>

static int argument_find(const char *function, const argument *expected, Py_ssize_t count,
                         PyObject *keyword, Py_ssize_t *index)
{
	for (Py_ssize_t i = 0; i < count; i++) {
		if (PyUnicode_CompareWithASCIIString(keyword, expected[i].name) == 0) {
			*index = i;
			return 0;
		}
	}
	PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'", function,
	             keyword);
	return -1;
}

/* A new reference to `value` as an int. */
static PyObject *index_parse(PyObject *value, const char *name)
{
	PyObject *number = PyNumber_Index(value);

	if (!number && PyErr_ExceptionMatches(PyExc_TypeError))
		PyErr_Format(PyExc_TypeError, "%s must be a whole number (int), not %R", name, value);
	return number;
}

static int unsigned_parse(PyObject *value, const char *name, uint64_t most, uint64_t *out)
{
	PyObject *number = index_parse(value, name);

	if (!number)
		return -1;
	*out = PyLong_AsUnsignedLongLong(number);
	Py_DECREF(number);
	if (*out == (uint64_t)-1 && PyErr_Occurred())
		return -1;
	if (*out > most) {
		PyErr_Format(PyExc_OverflowError, "%s is too large: %llu", name, (unsigned long long)*out);
		return -1;
	}
	return 0;
}

static int text_parse(PyObject *value, const char *name, const char **out)
{
	Py_ssize_t length;

	if (!PyUnicode_Check(value)) {
		PyErr_Format(PyExc_TypeError, "%s must be str", name);
		return -1;
	}
	*out = PyUnicode_AsUTF8AndSize(value, &length);
	if (!*out)
		return -1;
	if (strlen(*out) != (size_t)length) {
		PyErr_Format(PyExc_ValueError, "%s contains a null character", name);
		return -1;
	}
	return 0;
}

static int argument_convert(const argument *a, PyObject *value)
{
	PyObject *object;
	uint64_t number;
	int truth;

	switch (a->kind) {
	case ARGUMENT_OBJECT:
		*(PyObject **)a->out = value;
		return 0;
	case ARGUMENT_BOOL:
		truth = PyObject_IsTrue(value);
		*(bool *)a->out = truth > 0;
		return truth < 0 ? -1 : 0;
	case ARGUMENT_INT:
		*(int *)a->out = (int)PyLong_AsLong(value);
		return PyErr_Occurred() ? -1 : 0;
	case ARGUMENT_U32:
		if (unsigned_parse(value, a->name, UINT32_MAX, &number) < 0)
			return -1;
		*(uint32_t *)a->out = (uint32_t)number;
		return 0;
	case ARGUMENT_U64:
		return unsigned_parse(value, a->name, UINT64_MAX, a->out);
	case ARGUMENT_I64:
		object = index_parse(value, a->name);
		if (!object)
			return -1;
		*(int64_t *)a->out = PyLong_AsLongLong(object);
		Py_DECREF(object);
		return PyErr_Occurred() ? -1 : 0;
	case ARGUMENT_TEXT_OR_NONE:
		if (value == Py_None) {
			*(const char **)a->out = NULL;
			return 0;
		}
		return text_parse(value, a->name, a->out);
	case ARGUMENT_TEXT:
		return text_parse(value, a->name, a->out);
	}
	return -1;
}

int arguments_parse(const char *function, const argument *expected, Py_ssize_t count,
                    Py_ssize_t required, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
	Py_ssize_t keywords = kwnames ? PyTuple_Size(kwnames) : 0;
	uint32_t given = 0;

	if (nargs > count) {
		PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments (%zd given)", function,
		             count, nargs);
		return -1;
	}
	for (Py_ssize_t i = 0; i < nargs + keywords; i++) {
		Py_ssize_t at = i;

		if (i >= nargs &&
		    argument_find(function, expected, count, PyTuple_GetItem(kwnames, i - nargs), &at) < 0)
			return -1;
		if (given & 1u << at) {
			PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'", function,
			             expected[at].name);
			return -1;
		}
		given |= 1u << at;
		if (argument_convert(&expected[at], args[i]) < 0)
			return -1;
	}
	for (Py_ssize_t i = 0; i < required; i++) {
		if (!(given & 1u << i)) {
			PyErr_Format(PyExc_TypeError, "%s() misses the argument '%s'", function,
			             expected[i].name);
			return -1;
		}
	}
	return 0;
}

int seconds_parse(PyObject *value, const char *name, bool forever, int64_t *ns)
{
	double seconds;

	if (!value || value == Py_None) {
		*ns = forever ? FOR_EVER : 0;
		return 0;
	}
	seconds = PyFloat_AsDouble(value);
	if (seconds == -1.0 && PyErr_Occurred()) {
		if (PyErr_ExceptionMatches(PyExc_TypeError))
			PyErr_Format(PyExc_TypeError, "%s must be %sa number of seconds, not %R", name,
			             forever ? "None or " : "", value);
		return -1;
	}
	if (!(seconds >= 0) || (!forever && isinf(seconds))) {
		PyErr_Format(PyExc_ValueError, "%s must be %s%s, not %R", name, forever ? "None or " : "",
		             "a number of seconds, 0 or more", value);
		return -1;
	}
	*ns = seconds < 9.2e9 ? (int64_t)(seconds * 1e9) : FOR_EVER;
	return 0;
}

int limits_parse(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                 shmq_limits *limits)
{
	return ARGUMENTS(function, 8, {"msg_timeout", ARGUMENT_I64, &limits->msg_timeout_ns},
	                 {"max_msg_timeout", ARGUMENT_I64, &limits->max_msg_timeout_ns},
	                 {"max_req_timeout", ARGUMENT_I64, &limits->max_req_timeout_ns},
	                 {"max_msg_size", ARGUMENT_U64, &limits->max_msg_size},
	                 {"arena_size", ARGUMENT_U64, &limits->arena_size},
	                 {"node_id", ARGUMENT_U32, &limits->node_id},
	                 {"mem_queue_size", ARGUMENT_U32, &limits->mem_queue_size},
	                 {"inflight_slots", ARGUMENT_U32, &limits->inflight_slots});
}

/* Eight digits at once, one a byte: spread the nibbles, add '0', and 'a' - '9' - 1 where above 9. */
static void hex_half(uint32_t half, char *text)
{
	uint64_t x = half, letters;

	x = (x << 16 | x) & UINT64_C(0x0000ffff0000ffff);
	x = (x << 8 | x) & UINT64_C(0x00ff00ff00ff00ff);
	x = (x << 4 | x) & UINT64_C(0x0f0f0f0f0f0f0f0f);
	letters = (x + UINT64_C(0x0606060606060606)) >> 4 & UINT64_C(0x0101010101010101);
	x += UINT64_C(0x3030303030303030) + letters * ('a' - '9' - 1);
	for (int i = 0; i < 8; i++)
		text[i] = (char)(x >> (56 - 8 * i));
}

void id_hex(uint64_t id, char *text)
{
	hex_half((uint32_t)(id >> 32), text);
	hex_half((uint32_t)id, text + 8);
}

PyObject *id_str(uint64_t id)
{
	char text[16];

	id_hex(id, text);
	return PyUnicode_FromStringAndSize(text, sizeof(text));
}
