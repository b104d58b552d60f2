/* _native.Producer: publishes to one topic. The hot path of half the product is publish(). */
#include "module.h"

#include <errno.h>
#include <string.h>

#define STACK_BODIES 256
#define BACKLOGS_MAX 100 /* times one publish asks for a backlog queue */

/* ---- try again ------------------------------------------------------------------------------ */

bool producer_usable(producer_object *self)
{
	if (LIKELY(self->handle && !self->closed && !self->broker->closed)) {
		if (UNLIKELY(self->pending != NULL))
			loans_pending(self, false);
		return true;
	}
	if (self->topic)
		raise_status(self->state, SHMQ_CLOSED, NULL, "publish to '%U'", self->topic);
	else
		PyErr_SetString(PyExc_RuntimeError, "Producer.__init__() was not called");
	return false;
}

/* In a forked child: let go of the parent's handle, open one of our own. */
static bool producer_reopen(producer_object *self)
{
	broker_object *broker;
	uint64_t topic, generation;
	uint32_t epoch = self->epoch;
	shmq_producer *handle;
	int status;

	if (forked_call(self->state, self->on_forked, &broker, &topic, &generation) < 0)
		return false;
	if (epoch != self->epoch) { /* another thread was faster */
		Py_DECREF((PyObject *)broker);
		return true;
	}
	BROKER_CALL(broker, status,
	            ((void)until, shmq_producer_open(broker->handle, (uint32_t)topic,
	                                             (uint32_t)generation, &handle)));
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "open topic '%U' in a child process", self->topic);
		Py_DECREF((PyObject *)broker);
		return false;
	}
	if (!self->broker->active && !self->loans)
		shmq_producer_close(self->handle);
	Py_DECREF((PyObject *)self->broker);
	self->broker = broker;
	self->handle = handle;
	self->epoch++;
	return true;
}

/* Why nothing makes room, if it is not the consumers; NULL: it is. */
static const char *producer_hint(shmq_broker *broker, char *to, size_t size)
{
	char path[SHMQ_PATH_MOST];
	int error;

	if (!shmq_supervisor_alive(broker))
		return "the supervisor is dead, so nothing spills to disk: start it again "
			   "(`shmq serve`), or add consumers";
	error = shmq_disk_trouble(broker, path);
	if (!error)
		return NULL;
	if (error == ENOSPC || error == EDQUOT)
		PyOS_snprintf(to, size, "the data path %s is full: %s: make room there", path,
		              strerror(error));
	else
		PyOS_snprintf(to, size,
		              "the supervisor cannot write to the data path %s: %s: mend that, it tries "
		              "again every second",
		              path, strerror(error));
	return to;
}

static bool producer_room(producer_object *self, attempt *a, int status)
{
	char text[SHMQ_PATH_MOST + 256];
	const char *hint = NULL;

	if (!attempt_waits(a)) {
		shmq_broker *broker = self->broker->handle; /* NULL: detached just now */

		if (status == SHMQ_FULL && broker)
			hint = producer_hint(broker, text, sizeof(text));
		raise_status(self->state, status, hint, "publish to '%U'", self->topic);
		return false;
	}
	CORE_WAIT(self->broker, status, a->deadline ? a->deadline : FOR_EVER, WAIT_SLICE_NS,
	          shmq_producer_wait(self->handle, until));
	return PyErr_CheckSignals() == 0;
}

bool producer_retry(producer_object *self, attempt *a, int status)
{
	PyObject *made;

	switch (status) {
	case SHMQ_FULL:
	case SHMQ_NO_SPACE:
		return producer_room(self, a, status);
	case SHMQ_NEED_MAP:
		return broker_map_missing(self->broker, a);
	case SHMQ_NEED_BACKLOG:
		if (++a->backlogs > BACKLOGS_MAX || !self->on_backlog)
			break;
		made = PyObject_CallNoArgs(self->on_backlog);
		Py_XDECREF(made);
		return made != NULL;
	case SHMQ_FORKED:
		return producer_reopen(self);
	}
	raise_status(self->state, broker_gone(self->broker, status), NULL, "publish to '%U'",
	             self->topic);
	return false;
}

/* Publishes, waiting for room as asked; `large` bodies (one at least) are copied without the GIL.
 * 0, or -1 with an exception. */
static int publish(producer_object *self, const shmq_body *bodies, uint32_t n, bool large,
                   int64_t due, int64_t timeout, uint64_t *first_id)
{
	attempt a = {.timeout = timeout};
	int status;

	do {
		if (!producer_usable(self))
			return -1;
		if (UNLIKELY(large))
			CORE_CALL_SLOWLY(self->broker, status,
			                 shmq_publish(self->handle, bodies, n, due, until, first_id));
		else
			CORE_CALL(self->broker, status,
			          shmq_publish(self->handle, bodies, n, due, until, first_id));
		if (LIKELY(status == SHMQ_OK))
			return 0;
	} while (producer_retry(self, &a, status));
	return -1;
}

/* ---- one ------------------------------------------------------------------------------------ */

static int defer_parse(PyObject *value, int64_t *due)
{
	int64_t defer;

	*due = 0;
	if (!value || value == Py_None)
		return 0;
	if (seconds_parse(value, "defer", false, &defer) < 0)
		return -1;
	if (defer)
		*due = later_by(shmq_realtime(), defer);
	return 0;
}

static int options_parse(PyObject *defer, PyObject *timeout, int64_t *due, int64_t *timeout_ns)
{
	return defer_parse(defer, due) < 0 ? -1 : seconds_parse(timeout, "timeout", true, timeout_ns);
}

/* The buffer of a body that is not bytes. str is the usual mistake. */
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

static PyObject *producer_publish(producer_object *self, PyObject *const *args, Py_ssize_t nargs,
                                  PyObject *kwnames)
{
	PyObject *object, *defer = NULL, *timeout = NULL;
	int64_t due = 0, timeout_ns = FOR_EVER;
	Py_buffer view = {0};
	shmq_body body;
	uint64_t id;
	char *data;
	Py_ssize_t length;
	int r;

	if (LIKELY(nargs == 1 && !kwnames))
		object = args[0];
	else if (ARGUMENTS("publish", 1, {"body", ARGUMENT_OBJECT, &object},
	                   {"defer", ARGUMENT_OBJECT, &defer},
	                   {"timeout", ARGUMENT_OBJECT, &timeout}) < 0 ||
	         options_parse(defer, timeout, &due, &timeout_ns) < 0)
		return NULL;

	if (LIKELY(PyBytes_CheckExact(object))) { /* the caller keeps it alive */
		PyBytes_AsStringAndSize(object, &data, &length);
		body = (shmq_body){data, (uint64_t)length};
	} else {
		if (body_buffer(self, object, &view, -1) < 0)
			return NULL;
		body = (shmq_body){view.buf, (uint64_t)view.len};
	}
	r = publish(self, &body, 1, body.length >= SHMQ_LARGE, due, timeout_ns, &id);
	if (view.obj)
		PyBuffer_Release(&view);
	return r < 0 ? NULL : id_str(id);
}

/* ---- many ----------------------------------------------------------------------------------- */

static bool has_large(const shmq_body *bodies, uint32_t n)
{
	uint64_t lengths = 0;

	for (uint32_t i = 0; i < n; i++)
		lengths |= bodies[i].length;
	return lengths >= SHMQ_LARGE;
}

/* All exact bytes, none large: their addresses, valid as long as the GIL is held and nothing else
 * runs. False: some are not. */
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

/* The general case: `tuple` holds the objects, *views the buffers of those that are not bytes. */
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
                         int64_t due, int64_t timeout, uint64_t *first_id)
{
	Py_buffer *views = NULL;
	Py_ssize_t held = 0;
	int r = bodies_of_tuple(self, tuple, n, bodies, &views, &held);

	if (r == 0)
		r = publish(self, bodies, (uint32_t)n, has_large(bodies, (uint32_t)n), due, timeout,
		            first_id);
	while (held)
		PyBuffer_Release(&views[--held]);
	PyMem_Free(views);
	return r;
}

/* A list of bytes is published as it is while the GIL is held: the usual case, one pass, no
 * reference taken. If that does not do it (a lock, room, other objects) a tuple keeps them. */
static int publish_list(producer_object *self, PyObject *list, Py_ssize_t n, shmq_body *bodies,
                        int64_t due, int64_t timeout, uint64_t *first_id)
{
	PyObject *tuple;
	int r = -1;

	if (PyList_CheckExact(list) && producer_usable(self) && bodies_of_list(list, n, bodies) &&
	    shmq_publish(self->handle, bodies, (uint32_t)n, due, 0, first_id) == SHMQ_OK)
		return 0;
	if (PyErr_Occurred())
		return -1;
	tuple = PySequence_Tuple(list);
	if (tuple && PyTuple_Size(tuple) == n)
		r = publish_tuple(self, tuple, n, bodies, due, timeout, first_id);
	else if (tuple)
		PyErr_SetString(PyExc_RuntimeError, "the sequence changed while it was published");
	Py_XDECREF(tuple);
	return r;
}

static shmq_body *bodies_new(shmq_body *stack, Py_ssize_t n)
{
	shmq_body *bodies = stack;

	if (n > STACK_BODIES)
		bodies = n <= INT32_MAX ? PyMem_Malloc((size_t)n * sizeof(*bodies)) : NULL;
	if (!bodies)
		PyErr_NoMemory();
	return bodies;
}

static PyObject *producer_publish_list(producer_object *self, PyObject *const *args,
                                       Py_ssize_t nargs, PyObject *kwnames)
{
	PyObject *list, *sequence = NULL, *defer = NULL, *timeout = NULL;
	shmq_body stack[STACK_BODIES], *bodies = NULL;
	int64_t due = 0, timeout_ns = FOR_EVER;
	uint64_t first_id = 0;
	Py_ssize_t n;
	int r = -1;

	if (LIKELY(nargs == 1 && !kwnames))
		list = args[0];
	else if (ARGUMENTS("publish_list", 1, {"bodies", ARGUMENT_OBJECT, &list},
	                   {"defer", ARGUMENT_OBJECT, &defer},
	                   {"timeout", ARGUMENT_OBJECT, &timeout}) < 0 ||
	         options_parse(defer, timeout, &due, &timeout_ns) < 0)
		return NULL;
	if (PyBytes_Check(list) || PyByteArray_Check(list) || PyUnicode_Check(list))
		return PyErr_Format(PyExc_TypeError,
		                    "publish to '%U': a list of bodies is needed, not one body",
		                    self->topic);

	sequence = PySequence_Fast(list, "bodies must be a list or another iterable");
	if (!sequence)
		return NULL;
	n = PySequence_Size(sequence);
	bodies = bodies_new(stack, n);
	if (bodies)
		r = n ? publish_list(self, sequence, n, bodies, due, timeout_ns, &first_id) : 0;
	if (bodies != stack)
		PyMem_Free(bodies);
	Py_DECREF(sequence);
	return r < 0 ? NULL : PyLong_FromUnsignedLongLong(first_id);
}

static PyObject *producer_publish_fixed(producer_object *self, PyObject *const *args,
                                        Py_ssize_t nargs, PyObject *kwnames)
{
	PyObject *data, *defer = NULL, *timeout = NULL;
	shmq_body stack[STACK_BODIES], *bodies = NULL;
	int64_t due = 0, timeout_ns = FOR_EVER;
	uint64_t first_id = 0, width;
	uint32_t count;
	Py_buffer view;
	int r = -1;

	if (ARGUMENTS("publish_fixed", 3, {"data", ARGUMENT_OBJECT, &data},
	              {"count", ARGUMENT_U32, &count}, {"width", ARGUMENT_U64, &width},
	              {"defer", ARGUMENT_OBJECT, &defer}, {"timeout", ARGUMENT_OBJECT, &timeout}) < 0 ||
	    options_parse(defer, timeout, &due, &timeout_ns) < 0 ||
	    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (count && width > (uint64_t)view.len / count)
		PyErr_Format(PyExc_ValueError, "publish to '%U': %u bodies of %llu bytes are not in %zd",
		             self->topic, count, (unsigned long long)width, view.len);
	else
		bodies = bodies_new(stack, count);
	if (bodies) {
		for (uint32_t i = 0; i < count; i++)
			bodies[i] = (shmq_body){(const char *)view.buf + i * width, width};
		r = count ? publish(self, bodies, count, has_large(bodies, count), due, timeout_ns,
		                    &first_id)
		          : 0;
	}
	if (bodies != stack)
		PyMem_Free(bodies);
	PyBuffer_Release(&view);
	return r < 0 ? NULL : PyLong_FromUnsignedLongLong(first_id);
}

/* nsqd's layout: int32 BE size, then as many bytes. The caller has looked at all of it before. */
static PyObject *producer_publish_framed(producer_object *self, PyObject *const *args,
                                         Py_ssize_t nargs, PyObject *kwnames)
{
	PyObject *data, *defer = NULL, *timeout = NULL;
	shmq_body stack[STACK_BODIES], *bodies = NULL;
	int64_t due = 0, timeout_ns = FOR_EVER, bad;
	uint64_t first_id = 0, start, used = 0;
	uint32_t count, whole = 0;
	Py_buffer view;
	int r = -1;

	if (ARGUMENTS("publish_framed", 3, {"data", ARGUMENT_OBJECT, &data},
	              {"start", ARGUMENT_U64, &start}, {"count", ARGUMENT_U32, &count},
	              {"defer", ARGUMENT_OBJECT, &defer}, {"timeout", ARGUMENT_OBJECT, &timeout}) < 0 ||
	    options_parse(defer, timeout, &due, &timeout_ns) < 0 ||
	    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	bodies = bodies_new(stack, count);
	if (bodies && start <= (uint64_t)view.len)
		shmq_wire_bodies((const char *)view.buf + start, (uint64_t)view.len - start, INT32_MAX,
		                 count, bodies, &whole, &used, &bad);
	if (bodies && whole < count)
		PyErr_Format(PyExc_ValueError, "publish to '%U': there are %u whole bodies, not %u",
		             self->topic, whole, count);
	else if (bodies)
		r = count ? publish(self, bodies, count, has_large(bodies, count), due, timeout_ns,
		                    &first_id)
		          : 0;
	if (bodies != stack)
		PyMem_Free(bodies);
	PyBuffer_Release(&view);
	return r < 0 ? NULL : PyLong_FromUnsignedLongLong(start + used);
}

/* nsqd's PUB commands, or one MPUB; (where they end, how many messages, how many answers). */
static PyObject *producer_publish_run(producer_object *self, PyObject *const *args,
                                      Py_ssize_t nargs, PyObject *kwnames)
{
	PyObject *data, *line;
	shmq_body bodies[STACK_BODIES];
	uint64_t first_id = 0, start, end, most, most_body, used = 0;
	Py_buffer view, line_view;
	uint32_t count = 0;
	bool batch = false;
	int r = -1;

	if (ARGUMENTS("publish_run", 6, {"data", ARGUMENT_OBJECT, &data}, {"start", ARGUMENT_U64, &start},
	              {"end", ARGUMENT_U64, &end}, {"line", ARGUMENT_OBJECT, &line},
	              {"max_msg_size", ARGUMENT_U64, &most},
	              {"max_body_size", ARGUMENT_U64, &most_body}) < 0 ||
	    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (PyObject_GetBuffer(line, &line_view, PyBUF_SIMPLE) < 0) {
		PyBuffer_Release(&view);
		return NULL;
	}
	if (start > end || end > (uint64_t)view.len || !line_view.len) {
		PyErr_SetString(PyExc_ValueError,
		                "publish_run() needs a line, and 0 <= start <= end <= len(data)");
	} else {
		const char *from = (const char *)view.buf + start, *mpub = line_view.buf;
		uint64_t length = (uint64_t)line_view.len;

		batch = start < end && *from == 'M';
		count = batch ? shmq_wire_batch(from, end - start, mpub, length, most, most_body,
		                                STACK_BODIES, bodies, &used)
		              : shmq_wire_publishes(from, end - start, mpub + 1, length - 1, most,
		                                    STACK_BODIES, bodies, &used);
		r = count ? publish(self, bodies, count, has_large(bodies, count), 0, 0, &first_id) : 0;
	}
	PyBuffer_Release(&line_view);
	PyBuffer_Release(&view);
	return r < 0 ? NULL : Py_BuildValue("KII", start + used, count, batch && count ? 1 : count);
}

/* Arrow's layout as bodies; false if an offset points outside. */
static bool bodies_of_offsets(const Py_buffer *data, const Py_buffer *offsets, bool wide,
                              uint64_t start, uint32_t count, shmq_body *bodies)
{
	uint64_t known = (uint64_t)offsets->len / (wide ? 8 : 4);

	if (start >= known || count >= known - start)
		return false;
	for (uint32_t i = 0; i < count; i++) {
		uint64_t at = start + i;
		int64_t from = wide ? ((const int64_t *)offsets->buf)[at]
		                    : ((const int32_t *)offsets->buf)[at];
		int64_t to = wide ? ((const int64_t *)offsets->buf)[at + 1]
		                  : ((const int32_t *)offsets->buf)[at + 1];

		if (from < 0 || to < from || to > data->len)
			return false;
		bodies[i] = (shmq_body){(const char *)data->buf + from, (uint64_t)(to - from)};
	}
	return true;
}

static PyObject *producer_publish_offsets(producer_object *self, PyObject *const *args,
                                          Py_ssize_t nargs, PyObject *kwnames)
{
	PyObject *data, *offsets, *defer = NULL, *timeout = NULL;
	shmq_body stack[STACK_BODIES], *bodies;
	int64_t due = 0, timeout_ns = FOR_EVER;
	uint64_t first_id = 0, start;
	Py_buffer data_view, offsets_view;
	uint32_t count;
	bool wide;
	int r = -1;

	if (ARGUMENTS("publish_offsets", 5, {"data", ARGUMENT_OBJECT, &data},
	              {"offsets", ARGUMENT_OBJECT, &offsets}, {"wide", ARGUMENT_BOOL, &wide},
	              {"start", ARGUMENT_U64, &start}, {"count", ARGUMENT_U32, &count},
	              {"defer", ARGUMENT_OBJECT, &defer}, {"timeout", ARGUMENT_OBJECT, &timeout}) < 0 ||
	    options_parse(defer, timeout, &due, &timeout_ns) < 0 ||
	    PyObject_GetBuffer(data, &data_view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (PyObject_GetBuffer(offsets, &offsets_view, PyBUF_SIMPLE) < 0) {
		PyBuffer_Release(&data_view);
		return NULL;
	}
	bodies = bodies_new(stack, count);
	if (bodies && !bodies_of_offsets(&data_view, &offsets_view, wide, start, count, bodies))
		PyErr_Format(PyExc_ValueError, "publish to '%U': the offsets do not fit the data",
		             self->topic);
	else if (bodies)
		r = count ? publish(self, bodies, count, has_large(bodies, count), due, timeout_ns,
		                    &first_id)
		          : 0;
	if (bodies != stack)
		PyMem_Free(bodies);
	PyBuffer_Release(&offsets_view);
	PyBuffer_Release(&data_view);
	return r < 0 ? NULL : PyLong_FromUnsignedLongLong(first_id);
}

/* As publish_offsets, with a mark; None: they were published before. */
static PyObject *producer_publish_marked(producer_object *self, PyObject *const *args,
                                         Py_ssize_t nargs, PyObject *kwnames)
{
	PyObject *data, *offsets, *timeout = NULL, *result = NULL;
	shmq_body stack[STACK_BODIES], *bodies = NULL;
	int64_t due = 0;
	attempt a = {.timeout = FOR_EVER};
	uint64_t first_id = 0, start;
	Py_buffer data_view, offsets_view;
	shmq_mark mark;
	uint32_t count;
	int status = CORE_RAISED;
	bool wide;

	if (ARGUMENTS("publish_marked", 9, {"data", ARGUMENT_OBJECT, &data},
	              {"offsets", ARGUMENT_OBJECT, &offsets}, {"wide", ARGUMENT_BOOL, &wide},
	              {"start", ARGUMENT_U64, &start}, {"count", ARGUMENT_U32, &count},
	              {"key0", ARGUMENT_U64, &mark.key[0]}, {"key1", ARGUMENT_U64, &mark.key[1]},
	              {"epoch", ARGUMENT_U64, &mark.epoch}, {"after", ARGUMENT_U64, &mark.after},
	              {"upto", ARGUMENT_U64, &mark.upto}, {"timeout", ARGUMENT_OBJECT, &timeout}) < 0 ||
	    options_parse(NULL, timeout, &due, &a.timeout) < 0 ||
	    PyObject_GetBuffer(data, &data_view, PyBUF_SIMPLE) < 0)
		return NULL;
	if (PyObject_GetBuffer(offsets, &offsets_view, PyBUF_SIMPLE) < 0) {
		PyBuffer_Release(&data_view);
		return NULL;
	}
	bodies = bodies_new(stack, count);
	if (bodies && !bodies_of_offsets(&data_view, &offsets_view, wide, start, count, bodies)) {
		PyErr_Format(PyExc_ValueError, "publish to '%U': the offsets do not fit the data",
		             self->topic);
	} else if (bodies) {
		do {
			if (!producer_usable(self)) {
				status = CORE_RAISED;
				break;
			}
			CORE_CALL_SLOWLY(self->broker, status,
			                 shmq_publish_marked(self->handle, bodies, count, &mark, until,
			                                     &first_id));
			if (status == SHMQ_OK || status == SHMQ_REPEATED)
				break;
		} while (producer_retry(self, &a, status));
	}
	if (status == SHMQ_OK)
		result = PyLong_FromUnsignedLongLong(first_id);
	else if (status == SHMQ_REPEATED)
		result = Py_NewRef(Py_None);
	if (bodies != stack)
		PyMem_Free(bodies);
	PyBuffer_Release(&offsets_view);
	PyBuffer_Release(&data_view);
	return result;
}

static PyObject *producer_mark(producer_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
	attempt a = {.timeout = FOR_EVER};
	uint64_t key[2];
	shmq_mark mark;
	int status;

	if (ARGUMENTS("mark", 2, {"key0", ARGUMENT_U64, &key[0]}, {"key1", ARGUMENT_U64, &key[1]}) < 0)
		return NULL;
	do {
		if (!producer_usable(self))
			return NULL;
		CORE_CALL_SLOWLY(self->broker, status, shmq_mark_read(self->handle, key, until, &mark));
		if (status == SHMQ_OK)
			return Py_BuildValue("(KK)", (unsigned long long)mark.epoch,
			                     (unsigned long long)mark.upto);
	} while (producer_retry(self, &a, status));
	return NULL;
}

static PyObject *producer_loan(producer_object *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *kwnames)
{
	PyObject *defer = NULL, *timeout = NULL;
	int64_t defer_ns, timeout_ns;
	uint64_t length;
	bool zero = true;

	if (ARGUMENTS("loan", 1, {"nbytes", ARGUMENT_U64, &length}, {"defer", ARGUMENT_OBJECT, &defer},
	              {"timeout", ARGUMENT_OBJECT, &timeout}, {"zero", ARGUMENT_BOOL, &zero}) < 0 ||
	    seconds_parse(defer, "defer", false, &defer_ns) < 0 ||
	    seconds_parse(timeout, "timeout", true, &timeout_ns) < 0)
		return NULL;
	if (!length)
		return PyErr_Format(self->state->exceptions[-SHMQ_INVALID],
		                    "loan from '%U': nbytes must be 1 or more, not 0: no message is empty, "
		                    "as nsqd's",
		                    self->topic);
	return loan_new(self, length, defer_ns, timeout_ns, zero);
}

/* ---- life ----------------------------------------------------------------------------------- */

static int producer_init(producer_object *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"broker",     "topic",     "generation", "name",
	                        "on_backlog", "on_forked", NULL};
	PyObject *broker, *name, *on_backlog, *on_forked;
	unsigned topic, generation;
	int status;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IIUOO:Producer", names, self->state->broker,
	                                 &broker, &topic, &generation, &name, &on_backlog, &on_forked))
		return -1;
	if (self->handle) {
		PyErr_SetString(PyExc_RuntimeError, "Producer.__init__() was called twice");
		return -1;
	}
	BROKER_CALL((broker_object *)broker, status,
	            ((void)until, shmq_producer_open(((broker_object *)broker)->handle, topic,
	                                             generation, &self->handle)));
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

static PyObject *producer_close(producer_object *self, PyObject *unused)
{
	(void)unused;
	self->closed = true;
	Py_RETURN_NONE;
}

static int producer_clear(producer_object *self)
{
	Py_CLEAR(self->on_backlog);
	Py_CLEAR(self->on_forked);
	return 0;
}

static void producer_dealloc(producer_object *self)
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

static PyMethodDef producer_methods[] = {
	METHOD("publish", producer_publish, FAST,
	       "publish($self, body, defer=None, timeout=None)\n--\n\nOne message; its id."),
	METHOD("publish_list", producer_publish_list, FAST,
	       "publish_list($self, bodies, defer=None, timeout=None)\n--\n\n"
	       "All or nothing; the first id as a number."),
	METHOD("publish_fixed", producer_publish_fixed, FAST,
	       "publish_fixed($self, data, count, width, defer=None, timeout=None)\n--\n\n"
	       "`count` bodies of `width` bytes out of one buffer."),
	METHOD("publish_offsets", producer_publish_offsets, FAST,
	       "publish_offsets($self, data, offsets, wide, start, count, defer=None, timeout=None)\n"
	       "--\n\nBodies out of one buffer, as Arrow lays them out."),
	METHOD("publish_framed", producer_publish_framed, FAST,
	       "publish_framed($self, data, start, count, defer=None, timeout=None)\n--\n\n"
	       "Bodies out of one buffer, as nsqd's MPUB has them; where they end."),
	METHOD("publish_run", producer_publish_run, FAST,
	       "publish_run($self, data, start, end, line, max_msg_size, max_body_size)\n--\n\n"
	       "nsqd's PUB commands of one topic, or one MPUB, in one go; (where they end, how many "
	       "messages, how many answers)."),
	METHOD("publish_marked", producer_publish_marked, FAST,
	       "publish_marked($self, data, offsets, wide, start, count, key0, key1, epoch, after, upto, "
	       "timeout=None)\n--\n\nAs publish_offsets, once for each mark; None: they were before."),
	METHOD("mark", producer_mark, FAST,
	       "mark($self, key0, key1)\n--\n\n(epoch + 1 or 0, how far it got) under this key."),
	METHOD("loan", producer_loan, FAST,
	       "loan($self, nbytes, defer=None, timeout=None, zero=True)\n--\n\n"
	       "Write a body in place."),
	METHOD("close", producer_close, METH_NOARGS, "close($self)\n--\n\nNo publish from now on."),
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef producer_properties[] = {
	{"topic", object_get, NULL, "Its name.", (void *)offsetof(producer_object, topic)},
	{"closed", closed_get, NULL, "Was close called?", (void *)offsetof(producer_object, closed)},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot producer_slots[] = {
	{Py_tp_doc, "Producer(broker, topic, generation, name, on_backlog, on_forked)\n--\n\n"
	            "Publishes to one topic."},
	{Py_tp_new, type_new},
	{Py_tp_init, producer_init},
	{Py_tp_dealloc, producer_dealloc},
	{Py_tp_traverse, producer_traverse},
	{Py_tp_clear, producer_clear},
	{Py_tp_methods, producer_methods},
	{Py_tp_getset, producer_properties},
	{0, NULL},
};

PyType_Spec producer_spec = {
	.name = "shmq._native.Producer",
	.basicsize = sizeof(producer_object),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = producer_slots,
};
