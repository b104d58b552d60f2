/* _native.Producer: publishes to one topic. publish() is the hot path of every producer. */
#include "types.h"

int producer_put(producer_object *self, const shmq_body *bodies, uint32_t n, bool large,
                 const shmq_terms *terms, int64_t timeout, uint64_t *first_id)
{
	attempt a = {.timeout = timeout};
	int status;

	do {
		if (!producer_usable(self))
			return -1;
		if (UNLIKELY(large))
			CORE_CALL_SLOWLY(self->broker, status,
			                 shmq_publish_on(self->handle, bodies, n, terms, until, first_id));
		else
			CORE_CALL(self->broker, status,
			          shmq_publish_on(self->handle, bodies, n, terms, until, first_id));
		if (LIKELY(status == SHMQ_OK))
			return 0;
	} while (producer_retry(self, &a, status));
	return -1;
}

/* ---- one ------------------------------------------------------------------------------------ */

/* Get the buffer of a body that is not bytes. A str is the usual mistake. */
static int body_buffer(producer_object *self, PyObject *object, Py_buffer *view, Py_ssize_t index)
{
	const char *advice = PyUnicode_Check(object)
	                             ? "; encode it first: text.encode()"
	                             : "; make bytes of it first: pickle.dumps(object), or "
	                               "json.dumps(object).encode()";
	PyObject *type;

	if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) == 0)
		return 0;
	if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
		PyErr_Format(PyExc_ValueError,
		             "publish to '%U': body %zd must be one contiguous block of memory; copy it "
		             "first: bytes(body)",
		             self->topic, index < 0 ? 0 : index);
		return -1;
	}
	if (!PyErr_ExceptionMatches(PyExc_TypeError))
		return -1;
	PyErr_Clear();
	type = PyType_GetName(Py_TYPE(object));
	if (type && index < 0)
		PyErr_Format(PyExc_TypeError, "publish to '%U': a body must be bytes-like, not %U%s",
		             self->topic, type, advice);
	else if (type)
		PyErr_Format(PyExc_TypeError, "publish to '%U': body %zd must be bytes-like, not %U%s",
		             self->topic, index, type, advice);
	Py_XDECREF(type);
	return -1;
}

static PyObject *publish_one(producer_object *self, const shmq_body *body, const shmq_terms *terms,
                             int64_t timeout)
{
	uint64_t id;

	if (producer_put(self, body, 1, body->length >= SHMQ_LARGE, terms, timeout, &id) < 0)
		return NULL;
	return id_str(id);
}

static PyObject *publish_with(producer_object *self, const shmq_body *body, PyObject *properties,
                              shmq_terms terms, int64_t timeout)
{
	uint8_t block[SHMQ_PROPERTIES_MOST];
	shmq_body packed = {block, 0};

	if (properties_pack(self->state, properties, block, &packed.length) < 0)
		return NULL;
	terms.properties = &packed;
	return publish_one(self, body, &terms, timeout);
}

/* The producer of the topic for messages of this priority, which the subclass keeps: a new
 * reference, or NULL with an exception. */
static producer_object *producer_lane(producer_object *self, PyObject *priority)
{
	PyObject *lane;

	if (!producer_usable(self))
		return NULL;
	lane = PyObject_CallMethod((PyObject *)self, "_lane", "O", priority);
	if (lane && !PyObject_TypeCheck(lane, self->state->producer)) {
		PyErr_SetString(PyExc_TypeError, "_lane() must return a Producer");
		Py_CLEAR(lane);
	}
	return (producer_object *)lane;
}

static FAST_METHOD(producer, publish)
{
	producer_object *lane = NULL;
	int64_t defer = 0, ttl = 0, timeout = FOR_EVER;
	PyObject *object, *properties = Py_None, *priority = NULL;
	Py_buffer view = {0};
	shmq_terms terms;
	shmq_body body;
	char *data;
	Py_ssize_t length;

	if (LIKELY(nargs == 1 && !kwnames))
		object = args[0];
	else if (ARGUMENTS("publish", 1, {"body", ARGUMENT_OBJECT, &object},
	                   {"defer", ARGUMENT_DELAY, &defer}, {"timeout", ARGUMENT_TIMEOUT, &timeout},
	                   {"properties", ARGUMENT_OBJECT, &properties}, {"ttl", ARGUMENT_TTL, &ttl},
	                   {"priority", ARGUMENT_OBJECT, &priority}) < 0)
		return NULL;
	if (UNLIKELY(priority && priority != Py_None)) {
		self = lane = producer_lane(self, priority);
		if (!lane)
			return NULL;
	}

	if (LIKELY(PyBytes_CheckExact(object))) { /* the caller keeps it alive */
		PyBytes_AsStringAndSize(object, &data, &length);
		body = (shmq_body){data, (uint64_t)length};
	} else {
		if (body_buffer(self, object, &view, -1) < 0) {
			Py_XDECREF((PyObject *)lane);
			return NULL;
		}
		body = (shmq_body){view.buf, (uint64_t)view.len};
	}
	terms = terms_after(defer, ttl);
	if (LIKELY(properties == Py_None))
		object = publish_one(self, &body, &terms, timeout);
	else
		object = publish_with(self, &body, properties, terms, timeout);
	if (view.obj)
		PyBuffer_Release(&view);
	Py_XDECREF((PyObject *)lane);
	return object;
}

/* ---- an object ------------------------------------------------------------------------------ */

/* Pickle an object with a pickler of shmq/objects.py: (dump, clear_memo, parts, buffers). Returns
 * the pickle if it is one short piece, and the pickler is clean again then; NULL without an
 * exception if it is not, and with one if pickling failed. */
static PyObject *pickled(PyObject *pickler, PyObject *object)
{
	PyObject *parts = PyTuple_GetItem(pickler, 2), *buffers = PyTuple_GetItem(pickler, 3);
	PyObject *done, *body;

	if (!parts || !buffers)
		return NULL;
	done = PyObject_CallFunctionObjArgs(PyTuple_GetItem(pickler, 0), object, NULL);
	if (!done)
		return NULL;
	Py_DECREF(done);
	if (PyList_Size(parts) != 1 || PyList_Size(buffers) != 0)
		return NULL;
	body = PyList_GetItem(parts, 0);
	if (!PyBytes_CheckExact(body) || PyBytes_Size(body) > BODY_COPIED)
		return NULL;
	Py_INCREF(body);
	if (PyList_SetSlice(parts, 0, 1, NULL) == 0)
		done = PyObject_CallNoArgs(PyTuple_GetItem(pickler, 1));
	else
		done = NULL;
	if (!done)
		Py_CLEAR(body);
	Py_XDECREF(done);
	return body;
}

/* Take the last item off a list. Returns NULL without an exception if the list is empty. */
static PyObject *last_of(PyObject *list)
{
	Py_ssize_t last = PyList_Size(list) - 1; /* -2 with SystemError if it is no list */
	PyObject *item;

	if (last < 0)
		return NULL;
	if (!IS_ALONE) { /* in one step, for another thread may take it too */
		item = PyObject_CallMethod(list, "pop", NULL);
		if (!item && PyErr_ExceptionMatches(PyExc_IndexError))
			PyErr_Clear();
		return item;
	}
	item = Py_NewRef(PyList_GetItem(list, last));
	if (PyList_SetSlice(list, last, last + 1, NULL) < 0)
		Py_CLEAR(item);
	return item;
}

static FAST_METHOD(producer, publish_object)
{
	PyObject *spare, *object, *pickler, *body;
	shmq_terms terms = terms_after(0, 0);
	int status = -1;
	uint64_t id;

	if (LIKELY(nargs == 2 && !kwnames))
		spare = args[0], object = args[1];
	else if (ARGUMENTS("publish_object", 2, {"picklers", ARGUMENT_OBJECT, &spare},
	                   {"obj", ARGUMENT_OBJECT, &object}) < 0)
		return NULL;
	pickler = last_of(
			spare); /* it leaves the list while it works: no other thread may use it then */
	if (!pickler)
		return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
	if (!PyTuple_Check(pickler) || PyTuple_Size(pickler) != 4) {
		Py_DECREF(pickler);
		return PyErr_Format(PyExc_TypeError, "publish_object() needs a list of picklers");
	}
	body = pickled(pickler, object);
	if (!body && !PyErr_Occurred())
		return pickler;
	if (body && PyList_Append(spare, pickler) == 0)
		status = producer_put(self,
		                      &(shmq_body){PyBytes_AsString(body), (uint64_t)PyBytes_Size(body)}, 1,
		                      false, &terms, FOR_EVER, &id);
	Py_XDECREF(body);
	Py_DECREF(pickler);
	return status < 0 ? NULL : PyBool_FromLong(1);
}

/* ---- many ----------------------------------------------------------------------------------- */

bool bodies_large(const shmq_body *bodies, uint32_t n)
{
	uint64_t lengths = 0;

	for (uint32_t i = 0; i < n; i++)
		lengths |= bodies[i].length;
	return lengths >= SHMQ_LARGE;
}

/* The addresses of bodies that are all exactly bytes and not large; they are valid as long as the
 * GIL is held and nothing else runs. Returns false if a body is anything else. */
static bool bodies_of_list(PyObject *list, Py_ssize_t n, shmq_body *bodies)
{
	uint64_t lengths = 0;
	char *data;
	Py_ssize_t length;

	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *item = PyList_GetItem(list, i);

		if (UNLIKELY(!PyBytes_CheckExact(item)))
			return false;
		PyBytes_AsStringAndSize(item, &data, &length);
		bodies[i] = (shmq_body){data, (uint64_t)length};
		lengths |= (uint64_t)length;
	}
	return lengths < SHMQ_LARGE;
}

/* The general case: `tuple` keeps the objects, *views the buffers of those that are not bytes. */
static int bodies_of_tuple(producer_object *self, PyObject *tuple, Py_ssize_t n, shmq_body *bodies,
                           Py_buffer **views, Py_ssize_t *held)
{
	char *data;
	Py_ssize_t length;

	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *item = PyTuple_GetItem(tuple, i);

		if (PyBytes_CheckExact(item)) {
			PyBytes_AsStringAndSize(item, &data, &length);
			bodies[i] = (shmq_body){data, (uint64_t)length};
			continue;
		}
		if (!*views)
			*views = PyMem_Calloc((size_t)(n - i), sizeof(Py_buffer));
		if (!*views) {
			PyErr_NoMemory();
			return -1;
		}
		if (body_buffer(self, item, &(*views)[*held], i) < 0)
			return -1;
		bodies[i] = (shmq_body){(*views)[*held].buf, (uint64_t)(*views)[*held].len};
		++*held;
	}
	return 0;
}

static int publish_tuple(producer_object *self, PyObject *tuple, Py_ssize_t n, shmq_body *bodies,
                         const shmq_terms *terms, int64_t timeout, uint64_t *first_id)
{
	Py_buffer *views = NULL;
	Py_ssize_t held = 0;
	int r = bodies_of_tuple(self, tuple, n, bodies, &views, &held);

	if (r == 0)
		r = producer_put(self, bodies, (uint32_t)n, bodies_large(bodies, (uint32_t)n), terms,
		                 timeout, first_id);
	while (held)
		PyBuffer_Release(&views[--held]);
	PyMem_Free(views);
	return r;
}

/* Usually a list of bytes can be published while the GIL is held, in one pass that takes no
 * references. If it cannot (a lock is held, room is lacking, or there are other objects), a tuple
 * keeps the bodies. */
static int publish_list(producer_object *self, PyObject *list, Py_ssize_t n, shmq_body *bodies,
                        const shmq_terms *terms, int64_t timeout, uint64_t *first_id)
{
	PyObject *tuple;
	int r = -1, status = SHMQ_AGAIN;

	if (IS_ALONE && PyList_CheckExact(list) && producer_usable(self) &&
	    bodies_of_list(list, n, bodies))
		status = shmq_publish_on(self->handle, bodies, (uint32_t)n, terms, 0, first_id);
	if (status == SHMQ_OK)
		return 0;
	if (status == SHMQ_REJECTED) /* it is counted, so it is not tried again */
		raise_status(self->state, status, NULL, "publish to '%U'", self->topic);
	if (PyErr_Occurred())
		return -1;
	tuple = PySequence_Tuple(list);
	if (tuple && PyTuple_Size(tuple) == n)
		r = publish_tuple(self, tuple, n, bodies, terms, timeout, first_id);
	else if (tuple)
		PyErr_SetString(PyExc_RuntimeError, "the sequence changed while it was published");
	Py_XDECREF(tuple);
	return r;
}

shmq_body *bodies_new(shmq_body stack[BODIES_ON_STACK], Py_ssize_t n)
{
	shmq_body *bodies = stack;

	if (n > BODIES_ON_STACK)
		bodies = n <= INT32_MAX ? PyMem_Malloc((size_t)n * sizeof(*bodies)) : NULL;
	if (!bodies)
		PyErr_NoMemory();
	return bodies;
}

static FAST_METHOD(producer, publish_list)
{
	shmq_body stack[BODIES_ON_STACK], *bodies = NULL;
	int64_t defer = 0, ttl = 0, timeout = FOR_EVER;
	PyObject *list, *sequence, *properties = Py_None;
	property_blocks packed;
	shmq_terms terms;
	uint64_t first_id = 0;
	Py_ssize_t n;
	int r = -1;

	if (LIKELY(nargs == 1 && !kwnames))
		list = args[0];
	else if (ARGUMENTS("publish_list", 1, {"bodies", ARGUMENT_OBJECT, &list},
	                   {"defer", ARGUMENT_DELAY, &defer}, {"timeout", ARGUMENT_TIMEOUT, &timeout},
	                   {"properties", ARGUMENT_OBJECT, &properties},
	                   {"ttl", ARGUMENT_TTL, &ttl}) < 0)
		return NULL;
	if (PyBytes_Check(list) || PyByteArray_Check(list) || PyUnicode_Check(list))
		return PyErr_Format(PyExc_TypeError,
		                    "publish to '%U': a list of bodies is needed, not one body",
		                    self->topic);

	sequence = PySequence_Fast(list, "bodies must be a list or another iterable");
	if (!sequence)
		return NULL;
	n = PySequence_Size(sequence);
	bodies = property_blocks_open(&packed, properties, n) < 0 ? NULL : bodies_new(stack, n);
	terms = terms_after(defer, ttl);
	terms.properties = packed.blocks;
	if (bodies && n)
		r = publish_list(self, sequence, n, bodies, &terms, timeout, &first_id);
	else if (bodies)
		r = 0;
	property_blocks_close(&packed);
	if (bodies != stack)
		PyMem_Free(bodies);
	Py_DECREF(sequence);
	return r < 0 ? NULL : PyLong_FromUnsignedLongLong(first_id);
}

static METHOD(producer, loan, (U64, nbytes),
              (DELAY, defer, 0)(TIMEOUT, timeout, FOR_EVER)(BOOL, zero, true)(OBJECT, properties,
                                                                              Py_None))
{
	uint8_t block[SHMQ_PROPERTIES_MOST];
	PyObject *packed = NULL;
	uint64_t length;

	if (!nbytes)
		return PyErr_Format(self->state->exceptions[-SHMQ_INVALID],
		                    "loan from '%U': nbytes must be 1 or more, not 0: no message is empty, "
		                    "as nsqd's",
		                    self->topic);
	if (properties_pack(self->state, properties, block, &length) < 0)
		return NULL;
	if (length && !(packed = PyBytes_FromStringAndSize((const char *)block, (Py_ssize_t)length)))
		return NULL;
	return loan_new(self, nbytes, packed, defer, timeout, zero);
}

/* ---- life ----------------------------------------------------------------------------------- */

static INIT(producer)
{
	static char *names[] = {"broker",     "topic",     "generation", "name",
	                        "on_backlog", "on_forked", NULL};
	PyObject *broker, *name, *on_backlog, *on_forked;
	unsigned topic, generation;
	int status;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IIUOO:Producer", names, self->state->broker,
	                                 &broker, &topic, &generation, &name, &on_backlog, &on_forked))
		return -1;
	if (!init_first(self->handle != NULL, "Producer"))
		return -1;
	BROKER_CALL((broker_object *)broker, status,
	            shmq_producer_open(((broker_object *)broker)->handle, topic, generation,
	                               &self->handle));
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "open topic '%U'", name);
		return -1;
	}
	self->broker = (broker_object *)Py_NewRef(broker);
	self->topic = Py_NewRef(name);
	self->on_backlog = Py_NewRef(on_backlog);
	self->on_forked = Py_NewRef(on_forked);
	return 0;
}

static NOARGS_METHOD(producer, close)
{
	self->closed = true;
	Py_RETURN_NONE;
}

static NOARGS_METHOD(producer, seal)
{
	if (!producer_usable(self))
		return NULL;
	self->sealed = true;
	shmq_producer_seal(self->handle);
	Py_RETURN_NONE;
}

static int producer_clear(producer_object *self)
{
	Py_CLEAR(self->on_backlog);
	Py_CLEAR(self->on_forked);
	return 0;
}

static DEALLOC(producer)
{
	PyObject_GC_UnTrack(self);
	loans_pending(self, true);
	if (self->handle)
		shmq_producer_close(self->handle);
	producer_clear(self);
	Py_XDECREF(self->topic);
	Py_XDECREF((PyObject *)self->broker);
	object_free((PyObject *)self);
}

static int producer_traverse(producer_object *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE((PyObject *)self));
	Py_VISIT(self->broker);
	Py_VISIT(self->on_backlog);
	Py_VISIT(self->on_forked);
	return 0;
}

#define X(name) METHOD_ROW(producer, Producer, name, FAST),
static PyMethodDef producer_methods[] = {
	METHOD_ROW(producer, Producer, publish, FAST),
	METHOD_ROW(producer, Producer, publish_object, FAST),
	METHOD_ROW(producer, Producer, publish_list, FAST),
	METHOD_ROW(producer, Producer, loan, FAST),
	METHOD_ROW(producer, Producer, seal, METH_NOARGS),
	METHOD_ROW(producer, Producer, close, METH_NOARGS),
	PRODUCER_METHODS(X) WIRE_METHODS(X){NULL, NULL, 0, NULL},
};
#undef X

static PyMemberDef producer_members[] = {
	MEMBER_ROW(producer, Producer, topic, T_OBJECT, topic),
	MEMBER_ROW(producer, Producer, closed, T_BOOL, closed),
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot producer_slots[] = {
	{Py_tp_doc, DOC_Producer},
	{Py_tp_new, type_new},
	{Py_tp_init, producer_init},
	{Py_tp_dealloc, producer_dealloc},
	{Py_tp_traverse, producer_traverse},
	{Py_tp_clear, producer_clear},
	{Py_tp_methods, producer_methods},
	{Py_tp_members, producer_members},
	{0, NULL},
};

TYPE_SPEC(producer, Producer, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);
