/* _native.Lanes: takes from many channels by a policy. Each lane is a Consumer, which settles what
 * was taken from it. */
#include "types.h"

#define TAKE_MOST 65536u

/* ---- usable --------------------------------------------------------------------------------- */

static bool lanes_usable(lanes_object *self)
{
	if (LIKELY(self->handle && !self->closed && !self->broker->closed))
		return true;
	if (init_called(self->handle != NULL, "Lanes"))
		raise_status(self->state, SHMQ_CLOSED, NULL, "take from many topics");
	return false;
}

/* A thread that is in the core without the GIL may be about to use a lane that was removed. */
static void lanes_enter(lanes_object *self)
{
	self->inside++;
}

static void lanes_leave(lanes_object *self)
{
	PyObject *retired = NULL;

	if (--self->inside == 0) {
		retired = self->retired;
		self->retired = NULL;
	}
	Py_XDECREF(retired);
}

/* ---- lanes ---------------------------------------------------------------------------------- */

/* Forget a lane in the core, keep its consumer while anybody may use it. Returns 0, or -1 with an
 * exception. */
static int lane_forget(lanes_object *self, consumer_object *consumer)
{
	if (consumer->lanes != self)
		return 0;
	if (self->inside) {
		if (!self->retired)
			self->retired = PyList_New(0);
		if (!self->retired || PyList_Append(self->retired, (PyObject *)consumer) < 0)
			return -1;
	}
	consumer->lanes = NULL;
	if (self->handle && !lanes_stale(self))
		shmq_lanes_remove(self->handle, consumer->handle);
	return 0;
}

/* Its consumers may be in use when it is garbage. */
static ENTRY(int, lanes_clear, (lanes_object * self), (self))
{
	PyObject *members = self->members, *consumer, *unused;
	Py_ssize_t at = 0;

	self->members = NULL;
	while (members && PyDict_Next(members, &at, &consumer, &unused)) {
		((consumer_object *)consumer)->lanes = NULL;
		if (self->handle && !lanes_stale(self))
			shmq_lanes_remove(self->handle, ((consumer_object *)consumer)->handle);
	}
	Py_XDECREF(members);
	Py_CLEAR(self->retired);
	Py_CLEAR(self->beacon);
	return 0;
}

static consumer_object *lane_of(lanes_object *self, PyObject *object)
{
	if (!PyObject_TypeCheck(object, self->state->consumer)) {
		PyErr_Format(PyExc_TypeError, "a lane must be a Consumer, not %R", object);
		return NULL;
	}
	if (!((consumer_object *)object)->handle) {
		PyErr_SetString(PyExc_RuntimeError, "Consumer.__init__() was not called");
		return NULL;
	}
	return (consumer_object *)object;
}

static METHOD(lanes, add, (OBJECT, consumer)(U32, level), )
{
	consumer_object *lane = lane_of(self, consumer);
	int status;

	if (!lane || !lanes_usable(self))
		return NULL;
	if (lane->lanes) {
		PyErr_SetString(PyExc_ValueError, "this Consumer is a lane already");
		return NULL;
	}
	if (PyDict_SetItem(self->members, consumer, Py_None) < 0)
		return NULL;
	status = shmq_lanes_add(self->handle, lane->handle, level, lane);
	if (status != SHMQ_OK) {
		if (PyDict_DelItem(self->members, consumer) < 0)
			PyErr_Clear();
		return raise_status(self->state, status, NULL, "take from '%U/%U' too", lane->topic,
		                    lane->channel);
	}
	lane->lanes = self;
	Py_RETURN_NONE;
}

static METHOD(lanes, remove, (OBJECT, consumer), )
{
	consumer_object *lane = lane_of(self, consumer);

	if (!lane || !init_called(self->handle != NULL, "Lanes"))
		return NULL;
	if (lane->lanes == self) {
		if (lane_forget(self, lane) < 0 || PyDict_DelItem(self->members, consumer) < 0)
			return NULL;
	}
	Py_RETURN_NONE;
}

static GETTER(lanes, consumers)
{
	return self->members ? PyDict_Keys(self->members) : PyList_New(0);
}

/* ---- take ----------------------------------------------------------------------------------- */

/* Call a method of the subclass, with an argument or without (NULL). Returns 0, or -1 with an
 * exception. */
static int tell(lanes_object *self, const char *method, PyObject *about)
{
	PyObject *result = about ? PyObject_CallMethod((PyObject *)self, method, "O", about)
	                         : PyObject_CallMethod((PyObject *)self, method, NULL);

	Py_XDECREF(result);
	return result ? 0 : -1;
}

/* Tell the subclass if topics or channels came or went. One thread at a time does that. */
static int hear_of_names(lanes_object *self)
{
	uint64_t names;
	int r;

	if (LIKELY(!self->follows) || self->hearing || lanes_stale(self))
		return 0;
	names = shmq_directory_generation(self->broker->handle);
	if (LIKELY(names == self->names))
		return 0;
	self->hearing = true;
	r = tell(self, "_names", NULL);
	self->hearing = false;
	if (r == 0)
		self->names = names;
	return r;
}

static int lanes_wait_once(lanes_object *self, int64_t deadline, int64_t slice)
{
	int status;

	lanes_enter(self);
	CORE_WAIT(self->broker, status, deadline, slice, shmq_lanes_wait(self->handle, until));
	lanes_leave(self);
	if (PyErr_CheckSignals() < 0) {
		if (!self->closed && !self->broker->closed && !lanes_stale(self))
			shmq_lanes_pass(self->handle); /* what it was woken for is somebody else's */
		return CORE_RAISED;
	}
	return status;
}

/* Do what `status` asks for before the next try. lane: which it is about, or NULL. Returns 1: try
 * again; 0: the time is over; -1: an exception is set. */
static int lanes_retry(lanes_object *self, attempt *a, int status, consumer_object *lane)
{
	switch (status) {
	case SHMQ_EMPTY:
		if (attempt_waits(a))
			return lanes_wait_once(self, a->deadline ? a->deadline : FOR_EVER, WAIT_SLICE_NS) ==
			                       CORE_RAISED
						   ? -1
						   : 1;
		return self->beacon ? beacon_tell(self->beacon) : 0;
	case SHMQ_NEED_MAP:
		return broker_map_missing(self->broker, a) ? 1 : -1;
	case SHMQ_FORKED:
		return tell(self, "_forked", NULL) < 0 ? -1 : 1;
	case SHMQ_GONE:
		if (!lane || broker_gone(self->broker, status) == CORE_STOPPED)
			break;
		return tell(self, "_gone", (PyObject *)lane) < 0 ? -1 : 1;
	}
	if (status == SHMQ_CLOSED && !self->closed && !self->broker->closed && lane && lane->closed)
		return 1; /* another thread closes the lane and removes it */
	if (lane)
		raise_status(self->state, broker_gone(self->broker, status), NULL, "take from '%U/%U'",
		             lane->topic, lane->channel);
	else
		raise_status(self->state, broker_gone(self->broker, status), NULL, "take from many topics");
	return -1;
}

/* Returns a Message (most 0), a Batch, or NULL; without an exception if the time is over. */
static PyObject *take_some(lanes_object *self, attempt *a, uint32_t most, shmq_message *to)
{
	PyObject *taken = NULL;
	int again;

	do {
		consumer_object *lane = NULL;
		void *tag = NULL;
		uint32_t got = 0;
		int status;

		if (!lanes_usable(self) || hear_of_names(self) < 0)
			return NULL;
		if (UNLIKELY(lanes_stale(self))) {
			status = SHMQ_FORKED;
		} else {
			lanes_enter(self);
			CORE_CALL(self->broker, status,
			          shmq_lanes_take(self->handle, to, most ? most : 1, until, &got, &tag));
			lane = (consumer_object *)Py_XNewRef(tag);
			lanes_leave(self);
		}
		again = -1;
		if (LIKELY(status == SHMQ_OK)) {
			taken = most ? batch_new(lane, to, got) : message_new(lane, to);
			if (!taken)
				consumer_untake(lane, to, got);
			again = taken || PyErr_Occurred() ? -1 : 1;
		} else if (status != CORE_RAISED) {
			again = lanes_retry(self, a, status, lane);
		}
		Py_XDECREF((PyObject *)lane);
	} while (again > 0);
	return taken;
}

static FAST_METHOD(lanes, take)
{
	attempt a = {.timeout = FOR_EVER};
	shmq_message m;
	PyObject *message;

	if (ARGUMENTS("take", 0, {"timeout", ARGUMENT_TIMEOUT, &a.timeout}) < 0)
		return NULL;
	message = take_some(self, &a, 0, &m);
	return message || PyErr_Occurred() ? message : Py_NewRef(Py_None);
}

static FAST_METHOD(lanes, take_many)
{
	attempt a = {.timeout = FOR_EVER};
	PyObject *batch;
	shmq_message *to;
	int64_t most;

	if (ARGUMENTS("take_many", 1, {"n", ARGUMENT_I64, &most},
	              {"timeout", ARGUMENT_TIMEOUT, &a.timeout}) < 0)
		return NULL;
	if (most < 1)
		return PyErr_Format(PyExc_ValueError, "take_many() needs n of 1 or more, not %lld",
		                    (long long)most);
	most = most < TAKE_MOST ? most : TAKE_MOST;
	to = PyMem_Malloc((size_t)most * sizeof(*to));
	if (!to)
		return PyErr_NoMemory();
	batch = take_some(self, &a, (uint32_t)most, to);
	PyMem_Free(to);
	return batch || PyErr_Occurred() ? batch : batch_empty(self->batch_type);
}

/* Returns true if no message will come any more, and nothing is wrong. */
static bool lanes_ended(lanes_object *self)
{
	return self->closed || self->broker->closed ||
	       broker_gone(self->broker, SHMQ_GONE) == CORE_STOPPED;
}

static NEXT(lanes)
{
	attempt a = {.timeout = FOR_EVER};
	PyObject *message;
	shmq_message m;

	if (self->handle && (self->closed || self->broker->closed))
		return NULL;
	message = take_some(self, &a, 0, &m);
	if (!message && self->handle && PyErr_ExceptionMatches(self->state->exceptions[-SHMQ_CLOSED]) &&
	    lanes_ended(self))
		PyErr_Clear();
	return message;
}

static METHOD(lanes, wait, (I64, deadline_ns), )
{
	bool found;

	if (!lanes_usable(self))
		return NULL;
	if (lanes_stale(self))
		Py_RETURN_TRUE; /* a take opens it again */
	if (deadline_ns > 0 && lanes_wait_once(self, deadline_ns, SECOND_NS) == CORE_RAISED)
		return NULL;
	if (!lanes_usable(self))
		return NULL;
	found = shmq_lanes_look(self->handle) ||
	        (self->follows && shmq_directory_generation(self->broker->handle) != self->names);
	return PyBool_FromLong(found);
}

static NOARGS_METHOD(lanes, wake)
{
	if (self->handle && !self->closed && !self->broker->closed && !lanes_stale(self))
		shmq_lanes_wake(self->handle);
	Py_RETURN_NONE;
}

static NOARGS_METHOD(lanes, pass_on)
{
	if (self->handle && !self->closed && !self->broker->closed && !lanes_stale(self))
		shmq_lanes_pass(self->handle);
	Py_RETURN_NONE;
}

static METHOD(lanes, limit, (U32, max_in_flight), )
{
	if (!lanes_usable(self))
		return NULL;
	self->max_in_flight = max_in_flight;
	if (!lanes_stale(self))
		shmq_lanes_limit(self->handle, max_in_flight);
	Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------------------- */

/* The weights of the levels; NULL with an exception. */
static uint32_t *weights_of(PyObject *weights, uint32_t *count)
{
	PyObject *tuple = PySequence_Tuple(weights);
	uint32_t *found = NULL;
	Py_ssize_t n = tuple ? PyTuple_Size(tuple) : -1;

	if (n >= 0 && n < UINT32_MAX / 8)
		found = PyMem_Calloc((size_t)n + 1, sizeof(*found));
	if (n >= 0 && !found)
		PyErr_NoMemory();
	for (Py_ssize_t i = 0; found && i < n; i++) {
		unsigned long weight = PyLong_AsUnsignedLong(PyTuple_GetItem(tuple, i));

		if (PyErr_Occurred()) {
			PyMem_Free(found);
			found = NULL;
			break;
		}
		found[i] = weight > UINT32_MAX ? 0 : (uint32_t)weight;
	}
	Py_XDECREF(tuple);
	*count = (uint32_t)n;
	return found;
}

static void lanes_rouse(void *object)
{
	lanes_object *self = object;

	if (self->inside && !lanes_stale(self))
		shmq_lanes_wake(self->handle);
}

static void list_enter(lanes_object *self, broker_object *broker)
{
	self->broker = (broker_object *)Py_NewRef((PyObject *)broker);
	self->sleeper = (sleeper){.wake = lanes_rouse, .self = self};
	sleeper_enter(broker, &self->sleeper);
}

static void list_leave(lanes_object *self)
{
	sleeper_leave(self->broker, &self->sleeper);
	Py_DECREF((PyObject *)self->broker);
}

static int lanes_open(lanes_object *self, broker_object *broker, shmq_lanes **handle)
{
	int status;

	if (!broker_usable(broker, "take from many topics"))
		return -1;
	status = shmq_lanes_open(broker->handle, self->strict, self->follows, self->weights,
	                         self->levels, self->max_in_flight, handle);
	if (status == SHMQ_OK)
		return 0;
	raise_status(self->state, status, NULL, "take from many topics");
	return -1;
}

static INIT(lanes)
{
	static char *names[] = {"broker",     "strict",  "weights", "max_in_flight",
	                        "batch_type", "follows", NULL};
	PyObject *broker, *weights, *batch_type;
	int strict, follows, r;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!pOIO!p:Lanes", names, self->state->broker,
	                                 &broker, &strict, &weights, &self->max_in_flight, &PyType_Type,
	                                 &batch_type, &follows))
		return -1;
	r = PyObject_IsSubclass(batch_type, (PyObject *)self->state->batch);
	if (r == 0)
		PyErr_SetString(PyExc_TypeError, "batch_type must be a subclass of Batch");
	if (r <= 0 || !init_first(self->handle != NULL, "Lanes"))
		return -1;
	self->strict = strict;
	self->follows = follows;
	PyMem_Free(self->weights);
	self->weights = weights_of(weights, &self->levels);
	if (!self->weights)
		return -1;
	self->generation = shmq_fork_generation();
	Py_XDECREF(self->members);
	self->members = PyDict_New();
	if (!self->members || lanes_open(self, (broker_object *)broker, &self->handle) < 0)
		return -1;
	list_enter(self, (broker_object *)broker);
	self->batch_type = (PyTypeObject *)Py_NewRef(batch_type);
	return 0;
}

/* The parent's handle stays as it is, if one of its threads was in the core at the fork. */
static METHOD(lanes, reopen, (OBJECT, broker), )
{
	shmq_lanes *handle;

	if (!PyObject_TypeCheck(broker, self->state->broker))
		return PyErr_Format(PyExc_TypeError, "a Broker is needed, not %R", broker);
	if (!init_called(self->handle != NULL, "Lanes"))
		return NULL;
	if (!lanes_stale(self))
		Py_RETURN_FALSE;
	if (lanes_open(self, (broker_object *)broker, &handle) < 0)
		return NULL;
	if (!self->broker->active)
		shmq_lanes_free(self->handle);
	for (;;) { /* they are the parent's */
		PyObject *consumer, *unused;
		Py_ssize_t at = 0;

		if (!PyDict_Next(self->members, &at, &consumer, &unused))
			break;
		((consumer_object *)consumer)->lanes = NULL;
		if (PyDict_DelItem(self->members, consumer) < 0)
			PyErr_Clear();
	}
	self->handle = handle;
	self->inside = 0;
	self->names = 0;
	self->hearing = false;
	self->generation = shmq_fork_generation();
	list_leave(self);
	list_enter(self, (broker_object *)broker);
	Py_RETURN_TRUE;
}

/* Threads that take or wait find it closed. */
static NOARGS_METHOD(lanes, close)
{
	PyObject *consumers, *result;

	if (!self->handle || self->closed)
		Py_RETURN_NONE;
	self->closed = true;
	if (!lanes_stale(self))
		shmq_lanes_close(self->handle);
	consumers = PyDict_Keys(self->members);
	for (Py_ssize_t i = 0; consumers && i < PyList_Size(consumers); i++) {
		result = PyObject_CallMethod(PyList_GetItem(consumers, i), "close", NULL);
		if (!result) {
			self->closed = false; /* a signal handler raised: close may be called again */
			Py_DECREF(consumers);
			return NULL;
		}
		Py_DECREF(result);
	}
	if (!consumers)
		return NULL;
	Py_DECREF(consumers);
	Py_RETURN_NONE;
}

static DEALLOC(lanes)
{
	PyObject_GC_UnTrack(self);
	if (self->handle && !lanes_stale(self) && !self->closed)
		shmq_lanes_close(self->handle);
	lanes_clear(self);
	if (self->handle && (!lanes_stale(self) || !self->broker->active))
		shmq_lanes_free(self->handle);
	PyMem_Free(self->weights);
	Py_XDECREF((PyObject *)self->batch_type);
	if (self->broker)
		list_leave(self);
	object_free((PyObject *)self);
}

static int lanes_traverse(lanes_object *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE((PyObject *)self));
	Py_VISIT(self->broker);
	Py_VISIT(self->batch_type);
	Py_VISIT(self->members);
	Py_VISIT(self->retired);
	Py_VISIT(self->beacon);
	return 0;
}

static PyMethodDef lanes_methods[] = {
	METHOD_ROW(lanes, Lanes, add, FAST),
	METHOD_ROW(lanes, Lanes, remove, FAST),
	METHOD_ROW(lanes, Lanes, take, FAST),
	METHOD_ROW(lanes, Lanes, take_many, FAST),
	METHOD_ROW(lanes, Lanes, wait, FAST),
	METHOD_ROW(lanes, Lanes, wake, METH_NOARGS),
	METHOD_ROW(lanes, Lanes, pass_on, METH_NOARGS),
	METHOD_ROW(lanes, Lanes, limit, FAST),
	METHOD_ROW(lanes, Lanes, reopen, FAST),
	METHOD_ROW(lanes, Lanes, close, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef lanes_properties[] = {
	GETTER_ROW(lanes, Lanes, consumers),
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef lanes_members[] = {
	MEMBER_ROW(lanes, Lanes, closed, T_BOOL, closed),
	MEMBER_ROW(lanes, Lanes, max_in_flight, T_UINT, max_in_flight),
	MEMBER_ROW(lanes, Lanes, _broker, T_OBJECT, broker),
	{"_beacon", T_OBJECT, offsetof(lanes_object, beacon), 0, NULL},
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot lanes_slots[] = {
	{Py_tp_doc, DOC_Lanes},           {Py_tp_new, type_new},
	{Py_tp_init, lanes_init},         {Py_tp_dealloc, lanes_dealloc},
	{Py_tp_traverse, lanes_traverse}, {Py_tp_clear, lanes_clear},
	{Py_tp_iter, PyObject_SelfIter},  {Py_tp_iternext, lanes_next},
	{Py_tp_methods, lanes_methods},   {Py_tp_getset, lanes_properties},
	{Py_tp_members, lanes_members},   {0, NULL},
};

TYPE_SPEC(lanes, Lanes, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);
