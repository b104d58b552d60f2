#include "types.h"

#include <limits.h>
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

/* Returns `value` as an int, a new reference. */
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
	if ((*out != (uint64_t)-1 || !PyErr_Occurred()) && *out <= most)
		return 0;
	PyErr_Clear(); /* it names nothing */
	PyErr_Format(PyExc_ValueError, "%s must be from 0 to %llu, not %R", name,
	             (unsigned long long)most, value);
	return -1;
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

int signed_parse(PyObject *value, const char *name, int64_t *out)
{
	PyObject *number = index_parse(value, name);

	if (!number)
		return -1;
	*out = PyLong_AsLongLong(number);
	Py_DECREF(number);
	if (*out != -1 || !PyErr_Occurred())
		return 0;
	PyErr_Clear(); /* it names nothing */
	PyErr_Format(PyExc_ValueError, "%s must be from %lld to %lld, not %R", name,
	             (long long)INT64_MIN, (long long)INT64_MAX, value);
	return -1;
}

static int holder_parse(PyObject *tuple, shmq_lease_holder *out)
{
	unsigned long long serial, incarnation;
	unsigned queue, index;

	if (!PyTuple_Check(tuple)) {
		PyErr_Format(PyExc_TypeError, "a lease holder is a tuple, not %R", tuple);
		return -1;
	}
	if (!PyArg_ParseTuple(tuple, "IKIK", &queue, &serial, &index, &incarnation))
		return -1;
	*out = (shmq_lease_holder){queue, index, serial, incarnation};
	return 0;
}

int settings_parse(PyObject *tuple, shmq_settings *out)
{
	unsigned long long messages, bytes;
	long long ttl, first, most;
	const char *dead;

	if (!PyTuple_Check(tuple)) {
		PyErr_Format(PyExc_TypeError, "settings are a tuple, not %R", tuple);
		return -1;
	}
	if (!PyArg_ParseTuple(tuple, "KKLLLIIIs", &messages, &bytes, &ttl, &first, &most,
	                      &out->max_attempts, &out->overflow, &out->flags, &dead))
		return -1;
	if (strlen(dead) >= sizeof(out->dead_letter)) {
		PyErr_Format(PyExc_ValueError, "dead_letter is too long: %s", dead);
		return -1;
	}
	out->max_messages = messages;
	out->max_bytes = bytes;
	out->message_ttl = ttl;
	out->retry_first = first;
	out->retry_most = most;
	memset(out->dead_letter, 0, sizeof(out->dead_letter));
	strcpy(out->dead_letter, dead);
	return 0;
}

PyObject *settings_tuple(const shmq_settings *s)
{
	return Py_BuildValue("(KKLLLIIIs)", (unsigned long long)s->max_messages,
	                     (unsigned long long)s->max_bytes, (long long)s->message_ttl,
	                     (long long)s->retry_first, (long long)s->retry_most, s->max_attempts,
	                     s->overflow, s->flags, s->dead_letter);
}

static int argument_convert(const argument *a, PyObject *value)
{
	uint64_t number;
	int64_t whole;
	int truth;

	switch (a->kind) {
	case ARGUMENT_OBJECT: /* arguments_parse does it */
		break;
	case ARGUMENT_BOOL:
		truth = PyObject_IsTrue(value);
		*(bool *)a->out = truth > 0;
		return truth < 0 ? -1 : 0;
	case ARGUMENT_INT:
		if (signed_parse(value, a->name, &whole) < 0)
			return -1;
		if (whole < INT_MIN || whole > INT_MAX) {
			PyErr_Format(PyExc_ValueError, "%s must be from %d to %d, not %R", a->name, INT_MIN,
			             INT_MAX, value);
			return -1;
		}
		*(int *)a->out = (int)whole;
		return 0;
	case ARGUMENT_U32:
		if (unsigned_parse(value, a->name, UINT32_MAX, &number) < 0)
			return -1;
		*(uint32_t *)a->out = (uint32_t)number;
		return 0;
	case ARGUMENT_U64:
		return unsigned_parse(value, a->name, UINT64_MAX, a->out);
	case ARGUMENT_I64_OR_NONE:
		return value == Py_None ? 0 : signed_parse(value, a->name, a->out);
	case ARGUMENT_I64:
		return signed_parse(value, a->name, a->out);
	case ARGUMENT_TEXT_OR_NONE:
		*(const char **)a->out = NULL;
		return value == Py_None ? 0 : text_parse(value, a->name, a->out);
	case ARGUMENT_TEXT:
		return text_parse(value, a->name, a->out);
	case ARGUMENT_DELAY:
		return seconds_parse(value, a->name, false, a->out);
	case ARGUMENT_DELAY_OR_NONE:
		return value == Py_None ? 0 : seconds_parse(value, a->name, false, a->out);
	case ARGUMENT_TTL:
		if (seconds_parse(value, a->name, false, a->out) < 0)
			return -1;
		if (value == Py_None || *(int64_t *)a->out > 0)
			return 0;
		PyErr_Format(PyExc_ValueError,
		             "%s must be None (no limit) or a number of seconds, more than 0, not %R",
		             a->name, value);
		return -1;
	case ARGUMENT_TIMEOUT:
		return seconds_parse(value, a->name, true, a->out);
	case ARGUMENT_HOLDER:
		return holder_parse(value, a->out);
	case ARGUMENT_SETTINGS:
		return settings_parse(value, a->out);
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
		if (expected[at].kind == ARGUMENT_OBJECT) /* in line: calls for every message have these */
			*(PyObject **)expected[at].out = args[i];
		else if (argument_convert(&expected[at], args[i]) < 0)
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

/* Returns the sign of a number; 0 with an exception set. */
static int number_sign(PyObject *value)
{
	PyObject *zero = PyLong_FromLong(0);
	int less = zero ? PyObject_RichCompareBool(value, zero, Py_LT) : -1;

	Py_XDECREF(zero);
	return less < 0 ? 0 : less ? -1 : 1;
}

int seconds_parse(PyObject *value, const char *name, bool forever, int64_t *ns)
{
	double seconds;

	if (!value || value == Py_None) {
		*ns = forever ? FOR_EVER : 0;
		return 0;
	}
	seconds = PyFloat_AsDouble(value);
	if (seconds == -1.0 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError)) {
		PyErr_Clear(); /* a whole number that no double holds */
		seconds = number_sign(value) < 0 ? -INFINITY : INFINITY;
	}
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
	                 {"in_flight_slots", ARGUMENT_U32, &limits->in_flight_slots});
}
