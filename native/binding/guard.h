/*
 * The lock of a Python without the GIL.
 *
 * With the GIL, a call from Python has the fields of all objects to itself until it gives the GIL
 * up: in CORE_WAIT, or where Python code may run. The binding counts on that. A free-threaded Python
 * runs such calls at the same time, so there each of them holds one critical section, that of
 * guard_object, for just as long: Python suspends a critical section wherever a thread gives up what
 * would be the GIL, and a call from within a call gets it again. Threads of one process therefore
 * take turns in the binding, for a microsecond each, and their Python code and the waits in the core
 * run beside each other.
 *
 * Each function that Python calls and that uses a field which may change is defined by one of these
 * macros, or by METHOD (arguments.h). Another lock is no alternative: whoever frees an object or
 * calls Python with it held would wait for itself.
 *
 * It does not keep the objects of others as they are: their references must be owned, for another
 * thread may change a list or a dict at any time.
 */
#ifndef SHMQ_BINDING_GUARD_H
#define SHMQ_BINDING_GUARD_H

#include <stdbool.h>

#ifdef Py_GIL_DISABLED

#define IS_ALONE 0 /* whether no other thread changes objects of Python during a call */
extern PyObject guard_object[1];

/* Python 3.13 does not see that a thread begins a section in which it is already: it would let other
 * threads in there, in the middle of the first call. So it is not begun again; 3.14 does the same.
 * The fields that are read here have had their places since 3.13.0. */
static inline bool guard_is_ours(void)
{
#if PY_VERSION_HEX < 0x030E0000
	uintptr_t top = PyThreadState_Get()->critical_section; /* active, as long as we run */

	return top && !(top & 3) && /* it is of one mutex */
	       ((PyCriticalSection *)top)->_cs_mutex == &guard_object->ob_mutex;
#else
	return false;
#endif
}

#define GUARDED(call)                                                                              \
	__extension__({                                                                                \
		const bool ours_ = guard_is_ours();                                                        \
		PyCriticalSection section_;                                                                \
		__typeof__(call) result_;                                                                  \
                                                                                                   \
		if (!ours_)                                                                                \
			PyCriticalSection_Begin(&section_, guard_object);                                      \
		result_ = (call);                                                                          \
		if (!ours_)                                                                                \
			PyCriticalSection_End(&section_);                                                      \
		result_;                                                                                   \
	})
/* function(parameters) is entered by Python, and calls function_guarded(arguments), whose body
 * follows. */
#define ENTRY(type, function, parameters, arguments)                                               \
	type function parameters;                                                                      \
	static type function##_guarded parameters;                                                     \
	type function parameters                                                                       \
	{                                                                                              \
		return GUARDED(function##_guarded arguments);                                              \
	}                                                                                              \
	static type function##_guarded parameters
#define VOID_ENTRY(function, first, parameters, arguments)                                         \
	void function parameters;                                                                      \
	static void function##_guarded parameters;                                                     \
	void function parameters                                                                       \
	{                                                                                              \
		const bool ours_ = guard_is_ours();                                                        \
		PyCriticalSection section_;                                                                \
                                                                                                   \
		first;                                                                                     \
		if (!ours_)                                                                                \
			PyCriticalSection_Begin(&section_, guard_object);                                      \
		function##_guarded arguments;                                                              \
		if (!ours_)                                                                                \
			PyCriticalSection_End(&section_);                                                      \
	}                                                                                              \
	static void function##_guarded parameters
/* The garbage collector must not find an object that waits for its end. */
#define UNTRACK(self)                                                                              \
	if (PyObject_IS_GC((PyObject *)(self)))                                                        \
	PyObject_GC_UnTrack(self)

#else

#define IS_ALONE 1
#define GUARDED(call) call
#define ENTRY(type, function, parameters, arguments) type function parameters
#define VOID_ENTRY(function, first, parameters, arguments) void function parameters

#endif

#define NOARGS_METHOD(owner, name)                                                                 \
	ENTRY(PyObject *, owner##_##name, (owner##_object * self, PyObject * Py_UNUSED(unused)),       \
	      (self, NULL))
#define ARGUMENT_METHOD(owner, name, argument)                                                     \
	ENTRY(PyObject *, owner##_##name, (owner##_object * self, PyObject * argument),                \
	      (self, argument))
/* Its arguments are to be parsed by hand. */
#define FAST_METHOD(owner, name)                                                                   \
	ENTRY(PyObject *, owner##_##name,                                                              \
	      (owner##_object * self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames),     \
	      (self, args, nargs, kwnames))
#define EXIT_METHOD(owner)                                                                         \
	ENTRY(PyObject *, owner##___exit__,                                                            \
	      (owner##_object * self, PyObject *const *args, Py_ssize_t nargs), (self, args, nargs))
#define GETTER(owner, name)                                                                        \
	ENTRY(PyObject *, owner##_##name, (owner##_object * self, void *Py_UNUSED(unused)),            \
	      (self, NULL))
#define NEXT(owner) ENTRY(PyObject *, owner##_next, (owner##_object * self), (self))
#define INIT(owner)                                                                                \
	ENTRY(int, owner##_init, (owner##_object * self, PyObject * args, PyObject * kwargs),          \
	      (self, args, kwargs))
#define GETBUFFER(owner)                                                                           \
	ENTRY(int, owner##_getbuffer, (owner##_object * self, Py_buffer * view, int flags),            \
	      (self, view, flags))
#define RELEASEBUFFER(owner)                                                                       \
	VOID_ENTRY(owner##_releasebuffer, (void)0, (owner##_object * self, Py_buffer * view),          \
	           (self, view))
#define DEALLOC(owner) VOID_ENTRY(owner##_dealloc, UNTRACK(self), (owner##_object * self), (self))

#endif
