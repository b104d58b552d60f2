/*
 * The methods of _native.Broker for leases. Their values are tuples:
 *   lease holder   (queue, serial, index, incarnation)
 *   lease          (id, parent, count, bytes, parts, replays, on_disk)
 *   run            (from, to, bytes, count, positions of its parts as bytes)
 *   cursor         (queue, serial, id, part, slot, from, to, left)
 */
#define PY_SSIZE_T_CLEAN
#include "types.h"

#include <string.h>

static PyObject *lease_tuple(const shmq_lease *l)
{
	return Py_BuildValue("(KKIKIII)", (unsigned long long)l->id, (unsigned long long)l->parent,
	                     l->count, (unsigned long long)l->bytes, l->parts, l->replays, l->on_disk);
}

/* ---- the holder ----------------------------------------------------------------------------- */

NONE_METHOD(lease_holder_touch, (HOLDER, holder), BROKER_CALL,
            shmq_lease_holder_touch(self->handle, &holder, until), "keep the leases")
NONE_METHOD(lease_holder_adopt, (HOLDER, holder), BROKER_CALL,
            shmq_lease_holder_adopt(self->handle, &holder, until), "keep the leases")
NONE_METHOD(lease_holder_close, (HOLDER, holder), BROKER_CALL,
            shmq_lease_holder_close(self->handle, &holder, until), "leave the leases")
NONE_METHOD(lease_holder_leave, (HOLDER, holder), BROKER_CALL,
            shmq_lease_holder_leave(self->handle, &holder, until), "leave the leases")

METHOD(broker, lease_holder_open, (U32, queue)(U64, serial)(TEXT, name),
       (I64, ttl, 0)(I64, grace, 0)(U64, proof, 0)(U64, proof2, 0)(U64, whose, 0)(BOOL, known,
                                                                                  false)(U32, most,
                                                                                         0))
{
	const shmq_lease_settings settings = {.name = name,
	                                      .ttl_ns = ttl,
	                                      .grace_ns = grace,
	                                      .proof = {proof, proof2},
	                                      .whose = whose,
	                                      .known = known,
	                                      .most = most};
	shmq_lease_holder holder;
	int status;

	BROKER_CALL(self, status,
	            shmq_lease_holder_open(self->handle, queue, serial, &settings, until, &holder));
	if (status != SHMQ_OK)
		return raise_status(
				self->state, status,
				status == SHMQ_LEASE_FENCED
						? "give the secret with which it was opened, or wait until its time is over"
						: NULL,
				"lease as '%s'", name);
	return Py_BuildValue("(IKIK)", queue, (unsigned long long)serial, holder.index,
	                     (unsigned long long)holder.incarnation);
}

METHOD(broker, lease_wait, (HOLDER, holder)(I64, deadline), )
{
	attempt mapping = {0};
	int status;

	do {
		if (!broker_usable(self, "wait for messages"))
			return NULL;
		CORE_WAIT(self, status, deadline, WAIT_SLICE_NS,
		          shmq_lease_wait(self->handle, &holder, until));
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

/* ---- take, look, end ------------------------------------------------------------------------ */

COUNT_METHOD(lease_finish, (HOLDER, holder)(U64, through), uint64_t, BROKER_CALL,
             shmq_lease_finish(self->handle, &holder, through, until, &count), "finish lease %llu",
             (unsigned long long)through)
COUNT_METHOD(lease_return, (HOLDER, holder)(U64, id), uint64_t, BROKER_CALL,
             shmq_lease_return(self->handle, &holder, id, until, &count), "return lease %llu",
             (unsigned long long)id)
COUNT_METHOD(lease_end, (U32, queue)(U64, serial)(U64, id)(BOOL, back), uint64_t, BROKER_CALL,
             shmq_lease_end(self->handle, queue, serial, id, back, until, &count), "end lease %llu",
             (unsigned long long)id)

/* PyMem_Free out->at afterwards. Returns 0, or -1 with an exception. */
static int run_parse(PyObject *tuple, shmq_run *out)
{
	unsigned long long from, to, bytes;
	Py_ssize_t length;
	const char *data;
	unsigned count;
	uint64_t *at;

	if (!PyTuple_Check(tuple)) {
		PyErr_Format(PyExc_TypeError, "a run is a tuple, not %R", tuple);
		return -1;
	}
	if (!PyArg_ParseTuple(tuple, "KKKIy#", &from, &to, &bytes, &count, &data, &length))
		return -1;
	at = PyMem_Malloc((size_t)length);
	if (!at) {
		PyErr_NoMemory();
		return -1;
	}
	memcpy(at, data, (size_t)length);
	*out = (shmq_run){from, to, bytes, count, (uint32_t)((size_t)length / sizeof(*at)), at};
	return 0;
}

METHOD(broker, lease_take, (HOLDER, holder)(U64, parent)(U32, n)(U64, max_bytes)(U32, parts),
       (OBJECT, run, Py_None)(U32, most, 0))
{
	shmq_lease_wish wish = {
		.parent = parent, .max_bytes = max_bytes, .n = n, .parts = parts, .most = most};
	shmq_run on_disk = {0};
	shmq_lease lease;
	int status;

	if (run != Py_None) {
		if (run_parse(run, &on_disk) < 0)
			return NULL;
		wish.run = &on_disk;
	}
	BROKER_CALL(self, status, shmq_lease_take(self->handle, &holder, &wish, until, &lease));
	PyMem_Free((void *)on_disk.at);
	if (status == SHMQ_EMPTY)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status,
		                    status == SHMQ_TABLE_FULL ? "finish those that are open" : NULL,
		                    "lease %u messages", n);
	return lease_tuple(&lease);
}

METHOD(broker, lease_look, (HOLDER, holder)(U64, id), (BOOL, replay, false))
{
	shmq_lease lease;
	int status;

	BROKER_CALL(self, status, shmq_lease_look(self->handle, &holder, id, replay, until, &lease));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "look at lease %llu",
		                    (unsigned long long)id);
	return lease_tuple(&lease);
}

static PyObject *lease_item(const void *leases, uint32_t i)
{
	return lease_tuple((const shmq_lease *)leases + i);
}

METHOD(broker, lease_list, (HOLDER, holder), )
{
	uint32_t most = constant_of("LEASES"), count = 0;
	shmq_lease *leases = PyMem_Malloc(most * sizeof(*leases));
	PyObject *list = NULL;
	int status;

	if (!leases)
		return PyErr_NoMemory();
	BROKER_CALL(self, status, shmq_lease_list(self->handle, &holder, leases, most, until, &count));
	if (status == SHMQ_OK)
		list = list_of(count, lease_item, leases);
	else
		raise_status(self->state, status, NULL, "list the leases");
	PyMem_Free(leases);
	return list;
}

/* ---- read ----------------------------------------------------------------------------------- */

static PyObject *cursor_tuple(const shmq_lease_cursor *c)
{
	return Py_BuildValue("(IKKIIKKI)", c->queue, (unsigned long long)c->serial,
	                     (unsigned long long)c->id, c->part, c->slot, (unsigned long long)c->from,
	                     (unsigned long long)c->to, c->left);
}

static bool cursor_parse(PyObject *tuple, shmq_lease_cursor *out)
{
	unsigned long long serial, id, from, to;
	unsigned queue, part, slot, left;

	if (!PyTuple_Check(tuple)) {
		PyErr_Format(PyExc_TypeError, "a cursor is a tuple, not %R", tuple);
		return false;
	}
	if (!PyArg_ParseTuple(tuple, "IKKIIKKI", &queue, &serial, &id, &part, &slot, &from, &to, &left))
		return false;
	*out = (shmq_lease_cursor){queue, part, slot, left, serial, id, from, to};
	return true;
}

METHOD(broker, lease_open, (U32, queue)(U64, serial)(U64, id)(U32, part), )
{
	shmq_lease_cursor cursor;
	int status;

	BROKER_CALL(self, status, shmq_lease_open(self->handle, queue, serial, id, part, &cursor));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "read part %u of lease %llu", part,
		                    (unsigned long long)id);
	return cursor_tuple(&cursor);
}

METHOD(broker, lease_read, (OBJECT, cursor)(U32, rows)(U64, max_bytes), )
{
	PyObject *result = NULL, *next;
	shmq_lease_cursor at;
	columns out = {0};
	uint32_t count = 0;
	uint64_t size = 0;
	int status;

	if (!cursor_parse(cursor, &at))
		return NULL;
	BROKER_CALL(self, status,
	            shmq_lease_measure(self->handle, &at, rows, max_bytes, &count, &size));
	if (status == SHMQ_OK && columns_new(&out, count, size) < 0)
		return NULL;
	if (status == SHMQ_OK)
		BROKER_CALL(self, status, shmq_lease_copy(self->handle, &at, count, size, &out.at));
	if (status == SHMQ_OK) {
		next = cursor_tuple(&at);
		if (next)
			result = Py_BuildValue("(NIOOOOO)", next, count, out.bytes[COLUMN_IDS],
			                       out.bytes[COLUMN_TIMESTAMPS], out.bytes[COLUMN_ATTEMPTS],
			                       out.bytes[COLUMN_OFFSETS], out.bytes[COLUMN_DATA]);
	} else {
		raise_status(self->state, status, NULL, "read lease %llu", (unsigned long long)at.id);
	}
	columns_free(&out);
	return result;
}

METHOD(broker, lease_properties, (OBJECT, cursor)(U32, count), )
{
	PyObject *pair = NULL;
	shmq_lease_cursor at;
	shmq_blocks to;
	uint64_t size = 0;
	int status;

	if (!cursor_parse(cursor, &at))
		return NULL;
	BROKER_CALL(self, status, shmq_lease_properties(self->handle, &at, count, &size, NULL));
	if (status == SHMQ_OK && !(pair = blocks_new(count, size, &to)))
		return NULL;
	if (status == SHMQ_OK)
		BROKER_CALL(self, status, shmq_lease_properties(self->handle, &at, count, &size, &to));
	if (status == SHMQ_OK)
		return pair;
	Py_XDECREF(pair);
	return raise_status(self->state, status, NULL, "read lease %llu", (unsigned long long)at.id);
}
