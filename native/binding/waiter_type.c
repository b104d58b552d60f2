/* _native.Waiter: one thread that waits for many consumers. */
#include "module.h"

static bool waiter_usable(waiter_object *self)
{
	if (LIKELY(self->handle && !self->closed && !self->broker->closed))
		return true;
	if (self->handle)
		raise_status(self->state, SHMQ_CLOSED, NULL, "wait for messages");
	else
		PyErr_SetString(PyExc_RuntimeError, "Waiter.__init__() was not called");
	return false;
}

/* Nobody waits with it any more. detach has taken the doorbell already. */
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

/* Their handles; room for as many indices behind them. */
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

static PyObject *indices(const uint32_t *ready, uint32_t count)
{
	PyObject *list = PyList_New(count);

	for (uint32_t i = 0; list && i < count; i++) {
		PyObject *index = PyLong_FromUnsignedLong(ready[i]);

		if (!index || PyList_SetItem(list, i, index) < 0)
			Py_CLEAR(list);
	}
	return list;
}

/* CORE_RAISED, or a status of shmq_waiter_wait. */
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

static PyObject *waiter_wait(waiter_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
	PyObject *given, *consumers, *result = NULL;
	shmq_consumer **handles;
	uint32_t n, count = 0, *ready;
	int64_t deadline;
	int status;

	if (ARGUMENTS("wait", 2, {"consumers", ARGUMENT_OBJECT, &given},
	              {"deadline_ns", ARGUMENT_I64, &deadline}) < 0 ||
	    !waiter_usable(self))
		return NULL;
	consumers = PySequence_Tuple(given); /* keeps them while the GIL is released */
	if (!consumers)
		return NULL;
	n = (uint32_t)PyTuple_Size(consumers);
	handles = handles_of(self, consumers, n);
	if (handles) {
		ready = (uint32_t *)(handles + n);
		status = deadline <= 0 ? shmq_waiter_wait(self->handle, handles, n, 0, ready, &count)
		                       : sleep_until(self, handles, n, deadline, ready, &count);
		if (status == SHMQ_OK || status == SHMQ_TIMEOUT || status == SHMQ_INTERRUPTED)
			result = indices(ready, count);
		else
			raise_status(self->state, status, NULL, "wait for messages");
		PyMem_Free(handles);
	}
	Py_DECREF(consumers);
	return result;
}

static PyObject *waiter_wake(waiter_object *self, PyObject *unused)
{
	(void)unused;
	if (self->handle && !self->closed && !self->broker->closed)
		shmq_waiter_wake(self->handle);
	Py_RETURN_NONE;
}

static PyObject *waiter_pass_on(waiter_object *self, PyObject *const *args, Py_ssize_t nargs,
                                PyObject *kwnames)
{
	PyObject *object;
	consumer_object *consumer;

	if (ARGUMENTS("pass_on", 1, {"consumer", ARGUMENT_OBJECT, &object}) < 0)
		return NULL;
	consumer = consumer_of(self, object);
	if (!consumer)
		return NULL;
	if (!consumer->closed && !consumer->broker->closed)
		shmq_consumer_pass(consumer->handle);
	Py_RETURN_NONE;
}

static PyObject *waiter_close(waiter_object *self, PyObject *unused)
{
	(void)unused;
	if (!self->handle || self->closed)
		Py_RETURN_NONE;
	if (self->waiting && !self->broker->closed)
		shmq_waiter_wake(self->handle);
	self->closed = true;
	if (!self->waiting)
		waiter_end(self);
	Py_RETURN_NONE;
}

void waiters_wake(broker_object *broker)
{
	for (waiter_object *w = broker->waiters; w; w = w->next)
		if (w->waiting)
			shmq_waiter_wake(w->handle);
}

/* ---- life ----------------------------------------------------------------------------------- */

static int waiter_init(waiter_object *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"broker", NULL};
	broker_object *broker;
	int status;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Waiter", names, self->state->broker,
	                                 &broker))
		return -1;
	if (self->handle) {
		PyErr_SetString(PyExc_RuntimeError, "Waiter.__init__() was called twice");
		return -1;
	}
	if (!broker_usable(broker, "wait for messages"))
		return -1;
	status = shmq_waiter_open(broker->handle, &self->handle);
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "wait for messages");
		return -1;
	}
	self->broker = (broker_object *)Py_NewRef((PyObject *)broker);
	self->next = broker->waiters;
	broker->waiters = self;
	return 0;
}

static void waiter_dealloc(waiter_object *self)
{
	if (self->handle) {
		waiter_object **link = &self->broker->waiters;

		while (*link != self)
			link = &(*link)->next;
		*link = self->next;
		if (!self->closed)
			waiter_end(self);
		shmq_waiter_free(self->handle);
		Py_DECREF((PyObject *)self->broker);
	}
	object_free((PyObject *)self);
}

static PyMethodDef waiter_methods[] = {
	METHOD("wait", waiter_wait, FAST,
	       "wait($self, consumers, deadline_ns)\n--\n\nIndices of those with something to look at."),
	METHOD("wake", waiter_wake, METH_NOARGS, "wake($self)\n--\n\nEnd the wait, or the next one."),
	METHOD("pass_on", waiter_pass_on, FAST,
	       "pass_on($self, consumer)\n--\n\nNobody here takes: tell the channel's next waiter."),
	METHOD("close", waiter_close, METH_NOARGS, "close($self)\n--\n\nGive back its doorbell."),
	{NULL, NULL, 0, NULL},
};

static PyType_Slot waiter_slots[] = {
	{Py_tp_doc, "Waiter(broker)\n--\n\nOne thread that waits for many consumers."},
	{Py_tp_new, type_new},
	{Py_tp_init, waiter_init},
	{Py_tp_dealloc, waiter_dealloc},
	{Py_tp_methods, waiter_methods},
	{0, NULL},
};

PyType_Spec waiter_spec = {
	.name = "shmq._native.Waiter",
	.basicsize = sizeof(waiter_object),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = waiter_slots,
};
