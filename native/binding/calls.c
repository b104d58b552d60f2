/* The calls that every type makes first: a usable broker, its segments, a handle in a forked child. */
#include "types.h"

#include <unistd.h>

#define MISSING_MAX 16 /* how many segments may be gone in a row while one operation maps its own */

bool broker_usable(broker_object *self, const char *tried)
{
	if (LIKELY(self->handle && !self->closed))
		return true;
	raise_status(self->state, SHMQ_CLOSED, "attach again", "%s", tried);
	return false;
}

int broker_gone(broker_object *self, int status)
{
	bool stopped = status == SHMQ_GONE && self->handle && shmq_broker_stopped(self->handle);

	return stopped ? CORE_STOPPED : status;
}

bool attempt_waits(attempt *a)
{
	if (a->timeout == 0 || a->timeout == FOR_EVER)
		return a->timeout != 0;
	if (!a->deadline)
		a->deadline = later_by(shmq_now(), a->timeout);
	return shmq_now() < a->deadline;
}

static bool segment_missing(broker_object *self, shmq_broker *handle, attempt *a, uint32_t queue,
                            uint64_t serial)
{
	if (++a->missing > MISSING_MAX) {
		raise_status(self->state, SHMQ_GONE, NULL, "open queue segment %llu",
		             (unsigned long long)serial);
		return false;
	}
	shmq_broker_unmap(handle, queue, serial);
	return true;
}

bool broker_map_for(broker_object *self, shmq_broker *handle, bool leaving, attempt *a)
{
	PyObject *opened;
	uint64_t serial;
	uint32_t queue;
	int fd, status;

	shmq_broker_missing(handle, &queue, &serial);
	if (!self->opener)
		return segment_missing(self, handle, a, queue, serial);
	opened = PyObject_CallFunction(self->opener, "K", (unsigned long long)serial);
	if (!opened && PyErr_ExceptionMatches(PyExc_FileNotFoundError)) {
		PyErr_Clear();
		return (leaving || broker_usable(self, "open a queue")) &&
		       segment_missing(self, handle, a, queue, serial);
	}
	if (!opened)
		return false;
	fd = (int)PyLong_AsLong(opened);
	Py_DECREF(opened);
	if (fd == -1 && PyErr_Occurred())
		return false;
	if (!leaving && !broker_usable(self, "open a queue")) {
		close(fd);
		return false;
	}
	status = shmq_broker_map(handle, queue, serial, fd);
	close(fd);
	if (status == SHMQ_GONE)
		return segment_missing(self, handle, a, queue, serial);
	if (status != SHMQ_OK)
		raise_status(self->state, status, NULL, "map queue segment %llu of '%U'",
		             (unsigned long long)serial, self->instance);
	return status == SHMQ_OK;
}

int broker_open_segment(broker_object *self, uint64_t serial)
{
	PyObject *opened = PyObject_CallFunction(self->opener, "K", (unsigned long long)serial);
	int fd = opened ? (int)PyLong_AsLong(opened) : -1;

	Py_XDECREF(opened);
	return fd;
}

bool broker_map_missing(broker_object *self, attempt *a)
{
	return broker_usable(self, "open a queue") && broker_map_for(self, self->handle, false, a);
}

int forked_call(module_state *state, PyObject *on_forked, broker_object **broker, uint64_t *first,
                uint64_t *second)
{
	PyObject *result = on_forked ? PyObject_CallNoArgs(on_forked) : NULL;
	PyObject *object;
	unsigned long long a, b;
	int r = -1;

	if (!result) {
		if (!on_forked)
			raise_status(state, SHMQ_FORKED, NULL, "go on in a child process");
		return -1;
	}
	if (!PyTuple_Check(result)) {
		PyErr_SetString(PyExc_TypeError, "on_forked() must return a tuple of three");
	} else if (PyArg_ParseTuple(result, "O!KK", state->broker, &object, &a, &b)) {
		*broker = (broker_object *)Py_NewRef(object);
		*first = a;
		*second = b;
		r = 0;
	}
	Py_DECREF(result);
	return r;
}

void sleeper_enter(broker_object *broker, sleeper *self)
{
	self->next = broker->sleepers;
	broker->sleepers = self;
}

void sleeper_leave(broker_object *broker, sleeper *self)
{
	sleeper **link = &broker->sleepers;

	while (*link != self)
		link = &(*link)->next;
	*link = self->next;
}
