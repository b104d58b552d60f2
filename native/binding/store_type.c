/* _native.Store: one results store. set() and get() are its hot path. */
#include "types.h"

#include <string.h>
#include <unistd.h>

#define HINT_GONE "it was deleted; `broker.results(name)` makes it again"
/* The longest value that get() copies to its stack first. */
#define SMALL_VALUE 4096u

static bool store_usable(store_object *self)
{
	if (LIKELY(self->handle && !self->broker->closed))
		return true;
	if (init_called(self->handle != NULL, "Store"))
		raise_status(self->state, SHMQ_CLOSED, NULL, "use results store '%U'", self->name);
	return false;
}

static int store_handle(store_object *self, broker_object *broker, uint32_t store, uint64_t serial,
                        shmq_store **handle)
{
	int status, fd = broker_usable(broker, "open a results store")
	                         ? broker_open_segment(broker, serial)
	                         : -1;

	if (fd < 0) {
		if (PyErr_ExceptionMatches(PyExc_FileNotFoundError)) {
			PyErr_Clear();
			raise_status(self->state, SHMQ_GONE, HINT_GONE, "open results store '%U'", self->name);
		}
		return -1;
	}
	status = broker_usable(broker, "open a results store")
	                 ? shmq_store_open(broker->handle, store, serial, fd, handle)
	                 : CORE_RAISED;
	close(fd);
	if (status != SHMQ_OK)
		raise_status(self->state, broker_gone(broker, status),
		             status == SHMQ_GONE ? HINT_GONE : NULL, "open results store '%U'", self->name);
	return status == SHMQ_OK ? 0 : -1;
}

/* In a forked child: drop the parent's handle and open one of our own. */
static bool store_reopen(store_object *self)
{
	broker_object *broker;
	uint64_t store, serial;
	uint32_t epoch = self->epoch;
	shmq_store *handle;

	if (forked_call(self->state, self->on_forked, &broker, &store, &serial) < 0)
		return false;
	if (epoch != self->epoch || store_handle(self, broker, (uint32_t)store, serial, &handle) < 0) {
		Py_DECREF((PyObject *)broker);
		return !PyErr_Occurred(); /* another thread was faster */
	}
	if (!self->broker->active)
		shmq_store_close(self->handle);
	Py_DECREF((PyObject *)self->broker);
	self->broker = broker;
	self->handle = handle;
	self->epoch++;
	return true;
}

/* Make a call on the store, and again in a forked child. `call` may use self->handle and `until`. */
#define STORE_CALL(self, status, how, call)                                                        \
	do {                                                                                           \
		if (!store_usable(self))                                                                   \
			(status) = CORE_RAISED;                                                                \
		else                                                                                       \
			how((self)->broker, status, call);                                                     \
		if ((status) == SHMQ_FORKED && !store_reopen(self))                                        \
			(status) = CORE_RAISED;                                                                \
	} while ((status) == SHMQ_FORKED)

static PyObject *store_raise(store_object *self, int status, const char *tried, PyObject *key)
{
	bool gone = status == SHMQ_GONE;

	status = broker_gone(self->broker, status);
	return raise_status(self->state, status, gone && status == SHMQ_GONE ? HINT_GONE : NULL,
	                    "%s %R in results store '%U'", tried, key, self->name);
}

/* ---- keys and values ------------------------------------------------------------------------ */

/* A key or a value: the bytes of a str (UTF-8, keys only), of bytes, or of another buffer. */
typedef struct bytes_like {
	shmq_body body;
	Py_buffer view;
} bytes_like;

static int bytes_get(bytes_like *out, PyObject *object, const char *what, bool text)
{
	const char *data;
	Py_ssize_t length;
	PyObject *type;

	out->view.obj = NULL;
	if (LIKELY(PyBytes_CheckExact(object))) {
		PyBytes_AsStringAndSize(object, (char **)(uintptr_t)&data, &length);
	} else if (text && PyUnicode_Check(object)) {
		data = PyUnicode_AsUTF8AndSize(object, &length);
		if (!data)
			return -1;
	} else if (PyObject_GetBuffer(object, &out->view, PyBUF_SIMPLE) == 0) {
		data = out->view.buf;
		length = out->view.len;
	} else {
		if (!PyErr_ExceptionMatches(PyExc_TypeError))
			return -1;
		PyErr_Clear();
		type = PyType_GetName(Py_TYPE(object));
		if (type)
			PyErr_Format(PyExc_TypeError, "%s must be %sbytes-like, not %U%s", what,
			             text ? "str or " : "", type,
			             PyUnicode_Check(object) ? "; encode it first: text.encode()" : "");
		Py_XDECREF(type);
		return -1;
	}
	out->body = (shmq_body){data, (uint64_t)length};
	return 0;
}

static void bytes_release(bytes_like *it)
{
	if (it->view.obj)
		PyBuffer_Release(&it->view);
}

/* ttl: seconds, or None for never. Returns 0, or -1 with TypeError or ValueError. */
static int ttl_get(PyObject *ttl, int64_t *ns)
{
	*ns = INT64_MAX;
	if (ttl == Py_None)
		return 0;
	if (seconds_parse(ttl, "ttl", false, ns) < 0)
		return -1;
	if (*ns > 0)
		return 0;
	PyErr_Format(PyExc_ValueError, "ttl must be more than 0 seconds, or None for no limit, not %R",
	             ttl);
	return -1;
}

static PyObject *put(store_object *self, PyObject *key, PyObject *value, PyObject *ttl,
                     bool only_if_absent, bool *stored)
{
	bytes_like k, v;
	int64_t ns;
	int status;

	if (ttl_get(ttl, &ns) < 0 || bytes_get(&k, key, "a key", true) < 0)
		return NULL;
	if (bytes_get(&v, value, "a value", false) < 0) {
		bytes_release(&k);
		return NULL;
	}
	if (v.body.length >= SHMQ_LARGE)
		STORE_CALL(
				self, status, CORE_CALL_SLOWLY,
				shmq_store_set(self->handle, &k.body, &v.body, ns, only_if_absent, until, stored));
	else
		STORE_CALL(
				self, status, CORE_CALL,
				shmq_store_set(self->handle, &k.body, &v.body, ns, only_if_absent, until, stored));
	bytes_release(&k);
	bytes_release(&v);
	return status == SHMQ_OK ? Py_None
	                         : store_raise(self, status, only_if_absent ? "add" : "set", key);
}

static METHOD(store, set, (OBJECT, key)(OBJECT, value), (OBJECT, ttl, Py_None))
{
	bool stored;

	return Py_XNewRef(put(self, key, value, ttl, false, &stored));
}

static METHOD(store, add, (OBJECT, key)(OBJECT, value), (OBJECT, ttl, Py_None))
{
	bool stored;

	if (!put(self, key, value, ttl, true, &stored))
		return NULL;
	return PyBool_FromLong(stored);
}

/* The value as bytes. If Python has no memory for one that was just taken, it goes back, unless there
 * is a newer one. When it would expire is not known any more, so it does not. */
static PyObject *value_new(store_object *self, const shmq_body *key, bool taken, const char *data,
                           uint64_t length)
{
	PyObject *made = PyBytes_FromStringAndSize(data, (Py_ssize_t)length), *type, *error, *trace;
	const shmq_body value = {data, length};
	bool stored;
	int status;

	if (LIKELY(made) || !taken)
		return made;
	PyErr_Fetch(&type, &error, &trace);
	STORE_CALL(self, status, CORE_CALL,
	           shmq_store_set(self->handle, key, &value, INT64_MAX, true, until, &stored));
	PyErr_Restore(type, error, trace);
	return NULL;
}

/* *out: the value as bytes; NULL if there is none. Returns a status. */
static int fetch(store_object *self, const shmq_body *key, bool take, PyObject **out)
{
	char small[SMALL_VALUE];
	uint64_t length = 0;
	int status;

	*out = NULL;
	STORE_CALL(self, status, CORE_CALL,
	           shmq_store_get(self->handle, key, take, until, small, sizeof(small), &length));
	if (status == SHMQ_OK)
		*out = value_new(self, key, take, small, length);
	while (status == SHMQ_TOO_BIG) {
		uint64_t room = length;
		PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)room);
		char *data;

		if (!bytes)
			return CORE_RAISED;
		data = PyBytes_AsString(bytes);
		STORE_CALL(self, status, CORE_CALL_SLOWLY,
		           shmq_store_get(self->handle, key, take, until, data, room, &length));
		if (status == SHMQ_OK)
			*out = length == room ? Py_NewRef(bytes) : value_new(self, key, take, data, length);
		Py_DECREF(bytes);
	}
	return status == SHMQ_OK && !*out ? CORE_RAISED : status;
}

static PyObject *fetch_or(store_object *self, PyObject *key, PyObject *otherwise, bool take)
{
	PyObject *value;
	bytes_like k;
	int status;

	if (bytes_get(&k, key, "a key", true) < 0)
		return NULL;
	status = fetch(self, &k.body, take, &value);
	bytes_release(&k);
	if (status == SHMQ_EMPTY)
		return Py_NewRef(otherwise);
	return status == SHMQ_OK ? value : store_raise(self, status, take ? "pop" : "get", key);
}

static FAST_METHOD(store, get)
{
	PyObject *key, *otherwise = Py_None;

	if (ARGUMENTS("get", 1, {"key", ARGUMENT_OBJECT, &key},
	              {"default", ARGUMENT_OBJECT, &otherwise}) < 0)
		return NULL;
	return fetch_or(self, key, otherwise, false);
}

static FAST_METHOD(store, pop)
{
	PyObject *key, *otherwise = Py_None;

	if (ARGUMENTS("pop", 1, {"key", ARGUMENT_OBJECT, &key},
	              {"default", ARGUMENT_OBJECT, &otherwise}) < 0)
		return NULL;
	return fetch_or(self, key, otherwise, true);
}

static METHOD(store, delete, (OBJECT, key), (OBJECT, value, Py_None))
{
	bytes_like k, v;
	bool deleted, only = value != Py_None;
	int status;

	if (bytes_get(&k, key, "a key", true) < 0)
		return NULL;
	if (only && bytes_get(&v, value, "a value", false) < 0) {
		bytes_release(&k);
		return NULL;
	}
	STORE_CALL(self, status, CORE_CALL,
	           shmq_store_delete(self->handle, &k.body, only ? &v.body : NULL, until, &deleted));
	bytes_release(&k);
	if (only)
		bytes_release(&v);
	return status == SHMQ_OK ? PyBool_FromLong(deleted) : store_raise(self, status, "delete", key);
}

/* ---- numbers -------------------------------------------------------------------------------- */

static METHOD(store, incr, (OBJECT, key),
              (I64, by, 1)(I64_OR_NONE, least, INT64_MIN)(I64_OR_NONE, most,
                                                          INT64_MAX)(OBJECT, ttl,
                                                                     Py_None)(BOOL, renew, false))
{
	int64_t ns, value;
	bytes_like k;
	bool changed;
	int status;

	if (ttl_get(ttl, &ns) < 0 || bytes_get(&k, key, "a key", true) < 0)
		return NULL;
	STORE_CALL(self, status, CORE_CALL,
	           shmq_store_incr(self->handle, &k.body,
	                           &(shmq_store_step){by, least, most, ns, renew}, until, &value,
	                           &changed));
	bytes_release(&k);
	if (status != SHMQ_OK)
		return store_raise(self, status, "count", key);
	if (!changed)
		Py_RETURN_NONE;
	return PyLong_FromLongLong(value);
}

/* ---- waiting -------------------------------------------------------------------------------- */

/* Look once for each key. Returns the index of the first that is there, n if none is, or -1 with an
 * exception. */
static Py_ssize_t find_any(store_object *self, PyObject *keys, const bytes_like *k, Py_ssize_t n,
                           bool take, PyObject **value)
{
	for (Py_ssize_t i = 0; i < n; i++) {
		int status = fetch(self, &k[i].body, take, value);

		if (status == SHMQ_OK)
			return i;
		if (status != SHMQ_EMPTY) {
			store_raise(self, status, "wait for", PyTuple_GetItem(keys, i));
			return -1;
		}
	}
	return n;
}

static Py_ssize_t wait_for(store_object *self, PyObject *keys, const bytes_like *k, Py_ssize_t n,
                           int64_t timeout, bool take, PyObject **value)
{
	int64_t deadline = timeout == FOR_EVER ? FOR_EVER : later_by(shmq_now(), timeout);
	uint32_t seen[SHMQ_STRIPES];

	for (;;) {
		uint64_t stripes = 0;
		Py_ssize_t found;
		int status;

		if (!store_usable(self))
			return -1;
		shmq_store_seen(self->handle, seen);
		found = find_any(self, keys, k, n, take, value);
		if (found != n || (timeout != FOR_EVER && shmq_now() >= deadline))
			return found;
		for (Py_ssize_t i = 0; i < n; i++)
			stripes |= UINT64_C(1) << shmq_store_stripe(self->handle, &k[i].body);
		CORE_WAIT(self->broker, status, deadline, WAIT_SLICE_NS,
		          shmq_store_wait(self->handle, NULL, stripes, seen, until));
		if ((status == SHMQ_FORKED && !store_reopen(self)) || PyErr_CheckSignals() < 0)
			return -1;
		if (status != SHMQ_OK && status != SHMQ_TIMEOUT && status != SHMQ_INTERRUPTED &&
		    status != SHMQ_FORKED) {
			store_raise(self, status, "wait for", PyTuple_GetItem(keys, 0));
			return -1;
		}
	}
}

/* (key, value) of the first of a tuple of keys that is there, NULL with an exception, or None. */
static PyObject *wait_any(store_object *self, PyObject *keys, int64_t timeout, bool take)
{
	Py_ssize_t n = PyTuple_Size(keys), ready = 0, found = -1;
	bytes_like *k = PyMem_Calloc((size_t)n + 1, sizeof(*k));
	PyObject *value = NULL, *pair = k ? PyTuple_New(2) : NULL; /* before a value is taken */

	if (!pair) {
		PyMem_Free(k);
		return PyErr_NoMemory();
	}
	while (ready < n && bytes_get(&k[ready], PyTuple_GetItem(keys, ready), "a key", true) == 0)
		ready++;
	if (ready == n)
		found = wait_for(self, keys, k, n, timeout, take, &value);
	while (ready)
		bytes_release(&k[--ready]);
	PyMem_Free(k);
	if (found < 0 || found == n) {
		Py_DECREF(pair);
		return found < 0 ? NULL : Py_NewRef(Py_None);
	}
	PyTuple_SetItem(pair, 0, Py_NewRef(PyTuple_GetItem(keys, found)));
	PyTuple_SetItem(pair, 1, value);
	return pair;
}

static METHOD(store, wait, (OBJECT, key), (TIMEOUT, timeout, FOR_EVER)(BOOL, delete, false))
{
	PyObject *keys = PyTuple_Pack(1, key), *pair, *value;

	if (!keys)
		return NULL;
	pair = wait_any(self, keys, timeout, delete);
	Py_DECREF(keys);
	if (!pair || pair == Py_None)
		return pair;
	value = Py_NewRef(PyTuple_GetItem(pair, 1));
	Py_DECREF(pair);
	return value;
}

static METHOD(store, wait_any, (OBJECT, keys), (TIMEOUT, timeout, FOR_EVER)(BOOL, delete, false))
{
	PyObject *tuple, *pair;

	if (PyUnicode_Check(keys) || PyBytes_Check(keys)) {
		PyErr_SetString(PyExc_TypeError, "wait_any() takes a sequence of keys, not one key");
		return NULL;
	}
	tuple = PySequence_Tuple(keys);
	if (!tuple)
		return NULL;
	if (PyTuple_Size(tuple))
		pair = wait_any(self, tuple, timeout, delete);
	else
		pair = PyErr_Format(PyExc_ValueError, "wait_any() needs at least one key");
	Py_DECREF(tuple);
	return pair;
}

static METHOD(store, stripe, (OBJECT, key), )
{
	bytes_like k;
	uint32_t stripe;

	if (!store_usable(self) || bytes_get(&k, key, "a key", true) < 0)
		return NULL;
	stripe = shmq_store_stripe(self->handle, &k.body);
	bytes_release(&k);
	return PyLong_FromUnsignedLong(stripe);
}

static NOARGS_METHOD(store, seen)
{
	uint32_t seen[SHMQ_STRIPES];

	if (!store_usable(self))
		return NULL;
	shmq_store_seen(self->handle, seen);
	return list_of_numbers(seen, SHMQ_STRIPES);
}

static METHOD(store, wait_news, (OBJECT, waiter)(U64, stripes)(OBJECT, seen)(I64, deadline_ns), )
{
	waiter_object *with = (waiter_object *)waiter;
	uint32_t counts[SHMQ_STRIPES];
	int status;

	if (!PyObject_TypeCheck(waiter, self->state->waiter) || !with->handle)
		return PyErr_Format(PyExc_TypeError, "a Waiter is needed, not %R", waiter);
	if (!PyList_Check(seen) || PyList_Size(seen) != SHMQ_STRIPES)
		return PyErr_Format(PyExc_TypeError, "seen must be the list that seen() returned");
	for (Py_ssize_t i = 0; i < SHMQ_STRIPES; i++)
		counts[i] = (uint32_t)PyLong_AsUnsignedLong(PyList_GetItem(seen, i));
	if (PyErr_Occurred() || !store_usable(self))
		return NULL;
	if (with->broker != self->broker || with->closed)
		return PyErr_Format(PyExc_ValueError,
		                    "the Waiter was closed, or belongs to another broker");
	if (with->waiting)
		return PyErr_Format(PyExc_RuntimeError, "another thread waits with this Waiter");
	with->waiting = true;
	CORE_WAIT(self->broker, status, deadline_ns, SECOND_NS,
	          shmq_store_wait(self->handle, with->handle, stripes, counts, until));
	with->waiting = false;
	if (with->closed && !with->broker->closed)
		shmq_waiter_close(with->handle);
	if (status != SHMQ_OK && status != SHMQ_TIMEOUT && status != SHMQ_INTERRUPTED)
		return store_raise(self, status, "wait for keys", Py_None);
	return PyErr_CheckSignals() < 0 ? NULL : PyBool_FromLong(status == SHMQ_OK);
}

/* ---- walking -------------------------------------------------------------------------------- */

/* The records of a scan as a list of (key, value or its length, ttl in ns or None). */
static PyObject *records_list(const char *data, uint64_t used, bool values)
{
	PyObject *list = PyList_New(0);

	for (uint64_t at = 0; list && at < used;) {
		shmq_store_record head;
		PyObject *key, *value, *ttl, *item;
		int r;

		memcpy(&head, data + at, sizeof(head));
		at += sizeof(head);
		key = PyBytes_FromStringAndSize(data + at, (Py_ssize_t)head.key_length);
		at += head.key_length;
		value = values ? PyBytes_FromStringAndSize(data + at, (Py_ssize_t)head.length)
		               : PyLong_FromUnsignedLong(head.length);
		at += values ? head.length : 0;
		ttl = head.ttl == INT64_MAX ? Py_NewRef(Py_None) : PyLong_FromLongLong(head.ttl);
		item = key && value && ttl ? PyTuple_Pack(3, key, value, ttl) : NULL;
		r = item ? PyList_Append(list, item) : -1;
		Py_XDECREF(key);
		Py_XDECREF(value);
		Py_XDECREF(ttl);
		Py_XDECREF(item);
		if (r < 0)
			Py_CLEAR(list);
	}
	return list;
}

static METHOD(store, scan, (U32, bucket), (BOOL, values, false)(U64, room, 65536))
{
	PyObject *list;
	uint64_t used = 0;
	bool more = false;
	char *buffer;
	int status;

	do {
		buffer = PyMem_Malloc((size_t)room + 1);
		if (!buffer)
			return PyErr_NoMemory();
		STORE_CALL(self, status, CORE_CALL_SLOWLY,
		           shmq_store_scan(self->handle, values, &bucket, &(shmq_store_room){buffer, room},
		                           until, &used, &more));
		if (status == SHMQ_TOO_BIG) {
			PyMem_Free(buffer);
			room = used;
		}
	} while (status == SHMQ_TOO_BIG);
	list = status == SHMQ_OK ? records_list(buffer, used, values)
	                         : store_raise(self, status, "list the keys", Py_None);
	PyMem_Free(buffer);
	if (!list)
		return NULL;
	return more ? Py_BuildValue("(NI)", list, bucket) : Py_BuildValue("(NO)", list, Py_None);
}

static NOARGS_METHOD(store, info)
{
	shmq_store_info i;

	if (!store_usable(self))
		return NULL;
	shmq_store_get_info(self->handle, &i);
	return Py_BuildValue("(IIKKKKKKK)", i.keys, i.max_keys, (unsigned long long)i.bytes,
	                     (unsigned long long)i.max_bytes, (unsigned long long)i.stored,
	                     (unsigned long long)i.removed, (unsigned long long)i.expired,
	                     (unsigned long long)i.refused, (unsigned long long)i.committed);
}

/* ---- the supervisor's ----------------------------------------------------------------------- */

/* A lock that stays held raises Busy; the supervisor's loop comes again. */
#define TRY(at, status, call) CORE_WAIT(at, status, FOR_EVER, LOCK_SLICE_NS / 4, call)

static METHOD(store, sweep, , (U32, limit, 4096))
{
	uint32_t expired;
	bool more;
	int status;

	STORE_CALL(self, status, TRY,
	           shmq_store_sweep(self->handle, shmq_now(), limit, until, &expired, &more));
	if (status != SHMQ_OK)
		return store_raise(self, status, "sweep", Py_None);
	return Py_BuildValue("(IO)", expired, more ? Py_True : Py_False);
}

static NOARGS_METHOD(store, trim)
{
	uint64_t bytes;
	int status;

	STORE_CALL(self, status, TRY, shmq_store_trim(self->handle, until, &bytes));
	if (status != SHMQ_OK)
		return store_raise(self, status, "trim", Py_None);
	return PyLong_FromUnsignedLongLong(bytes);
}

static NOARGS_METHOD(store, retire)
{
	int status;

	STORE_CALL(self, status, CORE_CALL_SLOWLY, shmq_store_retire(self->handle, until));
	if (status != SHMQ_OK)
		return store_raise(self, status, "close", Py_None);
	Py_RETURN_NONE;
}

/* ---- life ----------------------------------------------------------------------------------- */

static INIT(store)
{
	static char *names[] = {"broker", "store", "serial", "name", "on_forked", NULL};
	PyObject *name, *on_forked = Py_None;
	unsigned long long serial;
	broker_object *broker;
	unsigned store;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IKO!|O:Store", names, self->state->broker,
	                                 &broker, &store, &serial, &PyUnicode_Type, &name, &on_forked))
		return -1;
	if (!init_first(self->handle != NULL || self->name != NULL, "Store"))
		return -1;
	self->name = Py_NewRef(name);
	if (store_handle(self, broker, store, serial, &self->handle) < 0) {
		Py_CLEAR(self->name);
		return -1;
	}
	self->broker = (broker_object *)Py_NewRef((PyObject *)broker);
	if (on_forked != Py_None)
		self->on_forked = Py_NewRef(on_forked);
	return 0;
}

static int store_clear(store_object *self)
{
	Py_CLEAR(self->on_forked);
	return 0;
}

static int store_traverse(store_object *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE((PyObject *)self));
	Py_VISIT((PyObject *)self->broker);
	Py_VISIT(self->on_forked);
	return 0;
}

static DEALLOC(store)
{
	PyObject_GC_UnTrack(self);
	if (self->handle)
		shmq_store_close(self->handle);
	store_clear(self);
	Py_XDECREF((PyObject *)self->broker);
	Py_XDECREF(self->name);
	object_free((PyObject *)self);
}

static PyMethodDef store_methods[] = {
	METHOD_ROW(store, Store, set, FAST),
	METHOD_ROW(store, Store, add, FAST),
	METHOD_ROW(store, Store, get, FAST),
	METHOD_ROW(store, Store, pop, FAST),
	METHOD_ROW(store, Store, delete, FAST),
	METHOD_ROW(store, Store, incr, FAST),
	METHOD_ROW(store, Store, wait, FAST),
	METHOD_ROW(store, Store, wait_any, FAST),
	METHOD_ROW(store, Store, stripe, FAST),
	METHOD_ROW(store, Store, seen, METH_NOARGS),
	METHOD_ROW(store, Store, wait_news, FAST),
	METHOD_ROW(store, Store, scan, FAST),
	METHOD_ROW(store, Store, info, METH_NOARGS),
	METHOD_ROW(store, Store, sweep, FAST),
	METHOD_ROW(store, Store, trim, METH_NOARGS),
	METHOD_ROW(store, Store, retire, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};

static PyMemberDef store_members[] = {
	MEMBER_ROW(store, Store, name, T_OBJECT, name),
	MEMBER_ROW(store, Store, _broker, T_OBJECT, broker),
	{NULL, 0, 0, 0, NULL},
};

static PyType_Slot store_slots[] = {
	{Py_tp_doc, DOC_Store},
	{Py_tp_new, type_new},
	{Py_tp_init, store_init},
	{Py_tp_dealloc, store_dealloc},
	{Py_tp_traverse, store_traverse},
	{Py_tp_clear, store_clear},
	{Py_tp_methods, store_methods},
	{Py_tp_members, store_members},
	{0, NULL},
};

TYPE_SPEC(store, Store, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);
