/* _native.Waiter: one thread that waits for many consumers. */
#include "types.h"

static bool waiter_usable(waiter_object *self)
{
	if (LIKELY(self->handle && !self->closed && !self->broker->closed))
		return true;
	if (init_called(self->handle != NULL, "Waiter"))
		raise_status(self->state, SHMQ_CLOSED, NULL, "wait for messages");
	return false;
}

/* No thread waits with it any more. If the broker is closed, detach gave the doorbell back. */
static void waiter_end(waiter_object *self)
{
	if (!self->broker->closed)
		shmq_waiter_close(self->handle);
}

static consumer_object *consumer_of(waiter_object *self, PyObject *object)
{
	consumer_object *consumer = (consumer_object *)object;

	if (!PyObject_TypeCheck(object, self->state->consumer)) {
		PyErr_Format(PyExc_TypeError, "a Consumer is needed, not %R", object);
		return NULL;
	}
	if (!consumer->handle) {
		PyErr_SetString(PyExc_RuntimeError, "Consumer.__init__() was not called");
		return NULL;
	}
	return consumer;
}

/* The handles of the consumers, followed by room for one index each. */
static shmq_consumer **handles_of(waiter_object *self, PyObject *consumers, uint32_t n)
{
	shmq_consumer **handles = PyMem_Malloc((size_t)n * (sizeof(*handles) + sizeof(uint32_t)) + 1);

	if (!handles) {
		PyErr_NoMemory();
		return NULL;
	}
	for (uint32_t i = 0; i < n; i++) {
		consumer_object *consumer = consumer_of(self, PyTuple_GetItem(consumers, i));

		if (!consumer) {
			PyMem_Free(handles);
			return NULL;
		}
		handles[i] = consumer->handle;
	}
	return handles;
}

/* Returns CORE_RAISED, or a status of shmq_waiter_wait. */
static int sleep_until(waiter_object *self, shmq_consumer **handles, uint32_t n, int64_t deadline,
                       uint32_t *ready, uint32_t *count)
{
	int status;

	if (self->waiting) {
		PyErr_SetString(PyExc_RuntimeError, "another thread waits with this Waiter");
		return CORE_RAISED;
	}
	self->waiting = true;
	CORE_WAIT(self->broker, status, deadline, SECOND_NS,
	          shmq_waiter_wait(self->handle, handles, n, until, ready, count));
	self->waiting = false;
	if (self->closed)
		waiter_end(self);
	if (!waiter_usable(self) || (status == SHMQ_INTERRUPTED && PyErr_CheckSignals() < 0))
		return CORE_RAISED;
	return status;
}

static METHOD(waiter, wait, (OBJECT, consumers)(I64, deadline_ns), )
{
	PyObject *tuple, *result = NULL;
	shmq_consumer **handles;
	uint32_t n, count = 0, *ready;
	int status;

	if (!waiter_usable(self))
		return NULL;
	tuple = PySequence_Tuple(consumers); /* keeps the consumers while the GIL is released */
	if (!tuple)
		return NULL;
	n = (uint32_t)PyTuple_Size(tuple);
	handles = handles_of(self, tuple, n);
	if (handles) {
		ready = (uint32_t *)(handles + n);
		status = deadline_ns <= 0 ? shmq_waiter_wait(self->handle, handles, n, 0, ready, &count)
		                          : sleep_until(self, handles, n, deadline_ns, ready, &count);
		if (status == SHMQ_OK || status == SHMQ_TIMEOUT || status == SHMQ_INTERRUPTED)
			result = list_of_numbers(ready, count);
		else
			raise_status(self->state, status, NULL, "wait for messages");
		PyMem_Free(handles);
	}
	Py_DECREF(tuple);
	return result;
}

static NOARGS_METHOD(waiter, wake)
{
	if (self->handle && !self->closed && !self->broker->closed)
		shmq_waiter_wake(self->handle);
	Py_RETURN_NONE;
}

static METHOD(waiter, pass_on, (OBJECT, consumer), )
{
	consumer_object *other = consumer_of(self, consumer);

	if (!other)
		return NULL;
	if (!other->closed && !other->broker->closed)
		shmq_consumer_pass(other->handle);
	Py_RETURN_NONE;
}

/* A call for a consumer, made only while it and the waiter are open. */
typedef bool waiter_step(shmq_waiter *w, shmq_consumer *c);

static PyObject *step_for(waiter_object *self, PyObject *object, waiter_step *step)
{
	consumer_object *consumer = consumer_of(self, object);

	if (!consumer || !waiter_usable(self))
		return NULL;
	if (consumer->closed || consumer->broker->closed)
		Py_RETURN_FALSE;
	return PyBool_FromLong(step(self->handle, consumer->handle));
}

static ARGUMENT_METHOD(waiter, announce, consumer)
{
	return step_for(self, consumer, shmq_waiter_announce);
}

static ARGUMENT_METHOD(waiter, withdraw, consumer)
{
	return step_for(self, consumer, shmq_waiter_withdraw);
}

static NOARGS_METHOD(waiter, close)
{
	if (!self->handle || self->closed)
		Py_RETURN_NONE;
	if (self->waiting && !self->broker->closed)
		shmq_waiter_wake(self->handle);
	self->closed = true;
	if (!self->waiting)
		waiter_end(self);
	Py_RETURN_NONE;
}

static void waiter_rouse(void *object)
{
	waiter_object *self = object;

	if (self->waiting)
		shmq_waiter_wake(self->handle);
}

/* ---- life ----------------------------------------------------------------------------------- */

static INIT(waiter)
{
	static char *names[] = {"broker", NULL};
	broker_object *broker;
	int status;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Waiter", names, self->state->broker,
	                                 &broker))
		return -1;
	if (!init_first(self->handle != NULL, "Waiter"))
		return -1;
	if (!broker_usable(broker, "wait for messages"))
		return -1;
	status = shmq_waiter_open(broker->handle, &self->handle);
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "wait for messages");
		return -1;
	}
	self->broker = (broker_object *)Py_NewRef((PyObject *)broker);
	self->sleeper = (sleeper){.wake = waiter_rouse, .self = self};
	sleeper_enter(broker, &self->sleeper);
	return 0;
}

static DEALLOC(waiter)
{
	if (self->handle) {
		sleeper_leave(self->broker, &self->sleeper);
		if (!self->closed)
			waiter_end(self);
		shmq_waiter_free(self->handle);
		Py_DECREF((PyObject *)self->broker);
	}
	object_free((PyObject *)self);
}

static PyMethodDef waiter_methods[] = {
	METHOD_ROW(waiter, Waiter, wait, FAST),
	METHOD_ROW(waiter, Waiter, wake, METH_NOARGS),
	METHOD_ROW(waiter, Waiter, pass_on, FAST),
	METHOD_ROW(waiter, Waiter, announce, METH_O),
	METHOD_ROW(waiter, Waiter, withdraw, METH_O),
	METHOD_ROW(waiter, Waiter, close, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};

static PyType_Slot waiter_slots[] = {
	{Py_tp_doc, DOC_Waiter},         {Py_tp_new, type_new},           {Py_tp_init, waiter_init},
	{Py_tp_dealloc, waiter_dealloc}, {Py_tp_methods, waiter_methods}, {0, NULL},
};

TYPE_SPEC(waiter, Waiter, 0);
