/* The methods of _native.Broker for leases. A lessee is a tuple (queue, serial, index, incarnation), a
 * lease (id, parent, count, bytes, parts, replays, on_disk), a run (from, to, bytes, count, positions of
 * its parts as bytes), a cursor a tuple of its eight numbers. */
#define PY_SSIZE_T_CLEAN
#include "module.h"

#include <string.h>

#define LEASES_MOST 64
#define LEASE_PARTS 32

static int lessee_parse(PyObject *tuple, shmq_lessee *out)
{
	unsigned long long serial, incarnation;
	unsigned queue, index;

	if (!PyTuple_Check(tuple)) {
		PyErr_Format(PyExc_TypeError, "a lessee is a tuple, not %R", tuple);
		return -1;
	}
	if (!PyArg_ParseTuple(tuple, "IKIK", &queue, &serial, &index, &incarnation))
		return -1;
	*out = (shmq_lessee){queue, index, serial, incarnation};
	return 0;
}

static PyObject *lease_tuple(const shmq_lease *l)
{
	return Py_BuildValue("(KKIKIII)", (unsigned long long)l->id, (unsigned long long)l->parent,
	                     l->count, (unsigned long long)l->bytes, l->parts, l->replays, l->on_disk);
}

static PyObject *none_or(broker_object *self, int status, const char *tried)
{
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "%s", tried);
	Py_RETURN_NONE;
}

PyObject *broker_lessee_open(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
	int64_t ttl = 0, grace = 0;
	shmq_lessee lessee;
	uint64_t serial;
	uint32_t queue;
	const char *name;
	int status;

	if (ARGUMENTS("lessee_open", 3, {"queue", ARGUMENT_U32, &queue},
	              {"serial", ARGUMENT_U64, &serial}, {"name", ARGUMENT_TEXT, &name},
	              {"ttl", ARGUMENT_I64, &ttl}, {"grace", ARGUMENT_I64, &grace}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_lessee_open(self->handle, queue, serial, name, ttl, grace, until, &lessee));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "lease as '%s'", name);
	return Py_BuildValue("(IKIK)", queue, (unsigned long long)serial, lessee.index,
	                     (unsigned long long)lessee.incarnation);
}

PyObject *broker_lessee_touch(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	shmq_lessee lessee;
	PyObject *tuple;
	int status;

	if (ARGUMENTS("lessee_touch", 1, {"lessee", ARGUMENT_OBJECT, &tuple}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_lessee_touch(self->handle, &lessee, until));
	return none_or(self, status, "keep the leases");
}

PyObject *broker_lessee_close(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	shmq_lessee lessee;
	PyObject *tuple;
	int status;

	if (ARGUMENTS("lessee_close", 1, {"lessee", ARGUMENT_OBJECT, &tuple}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_lessee_close(self->handle, &lessee, until));
	return none_or(self, status, "leave the leases");
}

/* `at`: what the positions are copied to. */
static int run_parse(PyObject *tuple, uint64_t at[static LEASE_PARTS], shmq_run *out)
{
	unsigned long long from, to, bytes;
	Py_ssize_t length;
	const char *data;
	unsigned count;

	if (!PyTuple_Check(tuple)) {
		PyErr_Format(PyExc_TypeError, "a run is a tuple, not %R", tuple);
		return -1;
	}
	if (!PyArg_ParseTuple(tuple, "KKKIy#", &from, &to, &bytes, &count, &data, &length))
		return -1;
	if (length % 8 || (size_t)length > LEASE_PARTS * sizeof(at[0])) {
		PyErr_Format(PyExc_ValueError, "a run has positions of up to %d parts", LEASE_PARTS);
		return -1;
	}
	memcpy(at, data, (size_t)length);
	*out = (shmq_run){from, to, bytes, count, (uint32_t)(length / 8), at};
	return 0;
}

PyObject *broker_lease_take(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	uint64_t parent, max_bytes;
	shmq_lessee lessee;
	uint32_t n, parts;
	PyObject *tuple, *run_tuple = Py_None;
	uint64_t at[LEASE_PARTS];
	shmq_lease out;
	shmq_run run;
	int status;

	if (ARGUMENTS("lease_take", 5, {"lessee", ARGUMENT_OBJECT, &tuple},
	              {"parent", ARGUMENT_U64, &parent}, {"n", ARGUMENT_U32, &n},
	              {"max_bytes", ARGUMENT_U64, &max_bytes}, {"parts", ARGUMENT_U32, &parts},
	              {"run", ARGUMENT_OBJECT, &run_tuple}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0 ||
	    (run_tuple != Py_None && run_parse(run_tuple, at, &run) < 0))
		return NULL;
	BROKER_CALL(self, status,
	            shmq_lease_take(self->handle, &lessee, parent, n, max_bytes, parts,
	                            run_tuple == Py_None ? NULL : &run, until, &out));
	if (status == SHMQ_EMPTY)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status,
		                    status == SHMQ_TABLE_FULL ? "finish those that are open" : NULL,
		                    "lease %u messages", n);
	return lease_tuple(&out);
}

PyObject *broker_lease_look(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	shmq_lessee lessee;
	bool replay = false;
	PyObject *tuple;
	shmq_lease out;
	uint64_t id;
	int status;

	if (ARGUMENTS("lease_look", 2, {"lessee", ARGUMENT_OBJECT, &tuple}, {"id", ARGUMENT_U64, &id},
	              {"replay", ARGUMENT_BOOL, &replay}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_lease_look(self->handle, &lessee, id, replay, until, &out));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "look at lease %llu",
		                    (unsigned long long)id);
	return lease_tuple(&out);
}

PyObject *broker_lease_list(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	shmq_lease out[LEASES_MOST];
	shmq_lessee lessee;
	PyObject *tuple, *list;
	uint32_t count;
	int status;

	if (ARGUMENTS("lease_list", 1, {"lessee", ARGUMENT_OBJECT, &tuple}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_lease_list(self->handle, &lessee, out, LEASES_MOST, until, &count));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "list the leases");
	list = PyList_New((Py_ssize_t)count);
	for (uint32_t i = 0; list && i < count; i++) {
		PyObject *item = lease_tuple(&out[i]);

		if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
			Py_CLEAR(list);
	}
	return list;
}

PyObject *broker_lease_finish(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	uint64_t through, messages = 0;
	shmq_lessee lessee;
	PyObject *tuple;
	int status;

	if (ARGUMENTS("lease_finish", 2, {"lessee", ARGUMENT_OBJECT, &tuple},
	              {"through", ARGUMENT_U64, &through}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_lease_finish(self->handle, &lessee, through, until, &messages));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "finish lease %llu",
		                    (unsigned long long)through);
	return PyLong_FromUnsignedLongLong(messages);
}

PyObject *broker_lease_return(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
	uint64_t id, messages = 0;
	shmq_lessee lessee;
	PyObject *tuple;
	int status;

	if (ARGUMENTS("lease_return", 2, {"lessee", ARGUMENT_OBJECT, &tuple},
	              {"id", ARGUMENT_U64, &id}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0)
		return NULL;
	BROKER_CALL(self, status, shmq_lease_return(self->handle, &lessee, id, until, &messages));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "return lease %llu", (unsigned long long)id);
	return PyLong_FromUnsignedLongLong(messages);
}

PyObject *broker_lease_end(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
	uint64_t serial, id, messages = 0;
	uint32_t queue;
	bool back;
	int status;

	if (ARGUMENTS("lease_end", 4, {"queue", ARGUMENT_U32, &queue},
	              {"serial", ARGUMENT_U64, &serial}, {"id", ARGUMENT_U64, &id},
	              {"back", ARGUMENT_BOOL, &back}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            shmq_lease_end(self->handle, queue, serial, id, back, until, &messages));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "end lease %llu", (unsigned long long)id);
	return PyLong_FromUnsignedLongLong(messages);
}

PyObject *broker_lease_wait(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	attempt mapping = {0};
	shmq_lessee lessee;
	PyObject *tuple;
	int64_t deadline;
	int status;

	if (ARGUMENTS("lease_wait", 2, {"lessee", ARGUMENT_OBJECT, &tuple},
	              {"deadline", ARGUMENT_I64, &deadline}) < 0 ||
	    lessee_parse(tuple, &lessee) < 0)
		return NULL;
	do {
		if (!broker_usable(self, "wait for messages"))
			return NULL;
		CORE_WAIT(self, status, deadline, WAIT_SLICE_NS,
		          shmq_lease_wait(self->handle, &lessee, until));
		if (status == SHMQ_NEED_MAP && !broker_map_missing(self, &mapping))
			return NULL;
		if (PyErr_CheckSignals() < 0)
			return NULL;
	} while (status == SHMQ_NEED_MAP ||
	         ((status == SHMQ_TIMEOUT || status == SHMQ_INTERRUPTED) && shmq_now() < deadline));
	if (status != SHMQ_OK && status != SHMQ_TIMEOUT && status != SHMQ_INTERRUPTED)
		return raise_status(self->state, status, NULL, "wait for messages");
	return PyBool_FromLong(status == SHMQ_OK);
}

/* ---- reading -------------------------------------------------------------------------------- */

static PyObject *cursor_tuple(const shmq_lease_cursor *c)
{
	return Py_BuildValue("(IKKIIKKI)", c->queue, (unsigned long long)c->serial,
	                     (unsigned long long)c->id, c->part, c->slot, (unsigned long long)c->from,
	                     (unsigned long long)c->to, c->left);
}

PyObject *broker_lease_open(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	shmq_lease_cursor cursor;
	uint32_t queue, part;
	uint64_t serial, id;
	int status;

	if (ARGUMENTS("lease_open", 4, {"queue", ARGUMENT_U32, &queue},
	              {"serial", ARGUMENT_U64, &serial}, {"id", ARGUMENT_U64, &id},
	              {"part", ARGUMENT_U32, &part}) < 0)
		return NULL;
	BROKER_CALL(self, status,
	            ((void)until, shmq_lease_open(self->handle, queue, serial, id, part, &cursor)));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "read part %u of lease %llu", part,
		                    (unsigned long long)id);
	return cursor_tuple(&cursor);
}

PyObject *broker_lease_read(broker_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
	PyObject *tuple, *result = NULL, *column[5] = {NULL}, *next = NULL;
	unsigned long long serial, id, max_bytes, from, till;
	unsigned queue, part, slot, left;
	shmq_lease_cursor cursor;
	uint64_t bytes, size = 0;
	uint32_t rows, count = 0;
	char *to[5];
	int status;

	if (ARGUMENTS("lease_read", 3, {"cursor", ARGUMENT_OBJECT, &tuple},
	              {"rows", ARGUMENT_U32, &rows}, {"max_bytes", ARGUMENT_U64, &bytes}) < 0)
		return NULL;
	max_bytes = bytes;
	if (!PyTuple_Check(tuple))
		return PyErr_Format(PyExc_TypeError, "a cursor is a tuple, not %R", tuple);
	if (!PyArg_ParseTuple(tuple, "IKKIIKKI", &queue, &serial, &id, &part, &slot, &from, &till, &left))
		return NULL;
	cursor = (shmq_lease_cursor){queue, part, slot, left, serial, id, from, till};
	BROKER_CALL(self, status,
	            ((void)until, shmq_lease_measure(self->handle, &cursor, rows, max_bytes, &count,
	                                             &size)));
	if (status == SHMQ_OK) {
		const size_t bytes_of[5] = {count * 8, count * 8, count * 4, (count + (size_t)1) * 4,
		                            (size_t)size};

		for (int i = 0; i < 5; i++) {
			column[i] = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes_of[i]);
			if (!column[i])
				goto out;
			to[i] = PyBytes_AsString(column[i]);
		}
		BROKER_CALL(self, status,
		            ((void)until,
		             shmq_lease_copy(self->handle, &cursor, count, size, (uint64_t *)(void *)to[0],
		                             (int64_t *)(void *)to[1], (int32_t *)(void *)to[2],
		                             (int32_t *)(void *)to[3], (uint8_t *)to[4])));
	}
	if (status != SHMQ_OK) {
		raise_status(self->state, status, NULL, "read lease %llu", id);
		goto out;
	}
	next = cursor_tuple(&cursor);
	if (next)
		result = Py_BuildValue("(OIOOOOO)", next, count, column[0], column[1], column[2], column[3],
		                       column[4]);
out:
	Py_XDECREF(next);
	for (int i = 0; i < 5; i++)
		Py_XDECREF(column[i]);
	return result;
}
