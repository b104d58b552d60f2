/*
 * The arguments of methods: their kinds, the parser, and METHOD, which defines a method with parsed
 * arguments. The few methods that are called for every message parse theirs by hand.
 */
#ifndef SHMQ_BINDING_ARGUMENTS_H
#define SHMQ_BINDING_ARGUMENTS_H

#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED) /* which has none */
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "guard.h"
#include "shmq.h"

#include <stdbool.h>
#include <stdint.h>

#define FOR_EVER INT64_MAX

/* X(kind, C type) */
#define ARGUMENT_KINDS(X)                                                                          \
	X(OBJECT, PyObject *) /* borrowed */                                                           \
	X(BOOL, bool)                                                                                  \
	X(INT, int)                                                                                    \
	X(U32, uint32_t)                                                                               \
	X(U64, uint64_t)                                                                               \
	X(I64, int64_t)                                                                                \
	X(I64_OR_NONE, int64_t) /* None: the default */                                                \
	X(TEXT, const char *)   /* of a str */                                                         \
	X(TEXT_OR_NONE, const char *)                                                                  \
	X(DELAY, int64_t)         /* seconds, 0 or more, as ns; None: 0 */                             \
	X(DELAY_OR_NONE, int64_t) /* the same; None: the default */                                    \
	X(TIMEOUT, int64_t)       /* the same; None: FOR_EVER */                                       \
	X(TTL, int64_t)           /* seconds, more than 0, as ns; None: 0 */                           \
	X(HOLDER, shmq_lease_holder)                                                                   \
	X(SETTINGS, shmq_settings)

enum argument_kind {
#define X(kind, type) ARGUMENT_##kind,
	ARGUMENT_KINDS(X)
#undef X
};
#define X(kind, type) typedef type argument_##kind;
/* clang-format off */
ARGUMENT_KINDS(X)
/* clang-format on */
#undef X

typedef struct argument {
	const char *name;
	enum argument_kind kind;
	void *out; /* of the kind's C type */
} argument;

/* Parse positional and keyword arguments. The first `required` must be given; *out of the others
 * keeps its value if they are not. Returns 0, or -1 with TypeError or ValueError. */
int arguments_parse(const char *function, const argument *expected, Py_ssize_t count,
                    Py_ssize_t required, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames);
#define ARGUMENTS(function, required, ...)                                                         \
	arguments_parse(function, (const argument[]){__VA_ARGS__},                                     \
	                sizeof((const argument[]){__VA_ARGS__}) / sizeof(argument), required, args,    \
	                nargs, kwnames)
/* Convert a whole number. Returns 0, or -1 with TypeError or ValueError, which name it. */
int signed_parse(PyObject *value, const char *name, int64_t *out);
/* Convert seconds, 0 or more, to ns. None gives FOR_EVER if `forever`, else 0. */
int seconds_parse(PyObject *value, const char *name, bool forever, int64_t *ns);
/* Convert the tuple of settings that an argument of kind SETTINGS is: the fields in their order. */
int settings_parse(PyObject *tuple, shmq_settings *out);
/* The other way round. */
PyObject *settings_tuple(const shmq_settings *s);
/* Keyword arguments, all of them required, for the fields of `limits`. */
int limits_parse(const char *function, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                 shmq_limits *limits);

/*
 * METHOD(owner, name, required, optional) { ... } defines the Python method `name` of owner_object.
 * The body gets `self` and the arguments by name.
 *
 *     METHOD(broker, expire, (U32, queue), (U32, limit, 256)(I64_OR_NONE, now, shmq_now()))
 *     {
 *         ... self, queue, limit, now ...
 *     }
 *
 * required is a sequence of (KIND, name), optional one of (KIND, name, default); both may be empty.
 * The macros below walk a sequence: ..._A takes its first element and leaves ..._B to take the next
 * one, and so on; the one that is left at the end gets _END pasted to it, which is empty.
 */
#define METHOD(owner, name, required, optional)                                                    \
	FASTCALL_FUNCTION(owner##_##name);                                                             \
	static PyObject *owner##_##name##_parsed(owner##_object *self WALK(PARAMETER, required)        \
	                                                 WALK(PARAMETER, optional));                   \
	FASTCALL_FUNCTION(owner##_##name)                                                              \
	{                                                                                              \
		WALK(VARIABLE, required)                                                                   \
		WALK(DEFAULT, optional)                                                                    \
		const argument known_[] = {WALK(ENTRY, required) WALK(ENTRY, optional){0}};                \
                                                                                                   \
		if (arguments_parse(#name, known_, 0 WALK(ADD_ONE, required) WALK(ADD_ONE, optional),      \
		                    0 WALK(ADD_ONE, required), args, nargs, kwnames) < 0)                  \
			return NULL;                                                                           \
		return GUARDED(owner##_##name##_parsed((owner##_object *)self WALK(NAME, required)         \
		                                               WALK(NAME, optional)));                     \
	}                                                                                              \
	static PyObject *owner##_##name##_parsed(owner##_object *self WALK(PARAMETER, required)        \
	                                                 WALK(PARAMETER, optional))
#define FASTCALL_FUNCTION(name)                                                                    \
	PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)

/* clang-format off */
#define WALK(what, sequence) WALK_END(what##_A sequence)
#define WALK_END(...) WALK_PASTE(__VA_ARGS__)
#define WALK_PASTE(...) __VA_ARGS__##_END

#define PARAMETER_A(kind, name, ...) , argument_##kind name PARAMETER_B
#define PARAMETER_B(kind, name, ...) , argument_##kind name PARAMETER_A
#define PARAMETER_A_END
#define PARAMETER_B_END
#define VARIABLE_A(kind, name) argument_##kind name; VARIABLE_B
#define VARIABLE_B(kind, name) argument_##kind name; VARIABLE_A
#define VARIABLE_A_END
#define VARIABLE_B_END
#define DEFAULT_A(kind, name, ...) argument_##kind name = __VA_ARGS__; DEFAULT_B
#define DEFAULT_B(kind, name, ...) argument_##kind name = __VA_ARGS__; DEFAULT_A
#define DEFAULT_A_END
#define DEFAULT_B_END
#define ENTRY_A(kind, name, ...) {#name, ARGUMENT_##kind, &name}, ENTRY_B
#define ENTRY_B(kind, name, ...) {#name, ARGUMENT_##kind, &name}, ENTRY_A
#define ENTRY_A_END
#define ENTRY_B_END
#define ADD_ONE_A(...) + 1 ADD_ONE_B
#define ADD_ONE_B(...) + 1 ADD_ONE_A
#define ADD_ONE_A_END
#define ADD_ONE_B_END
#define NAME_A(kind, name, ...) , name NAME_B
#define NAME_B(kind, name, ...) , name NAME_A
#define NAME_A_END
#define NAME_B_END
/* clang-format on */

#endif
