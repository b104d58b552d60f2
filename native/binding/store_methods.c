/* The methods of _native.Broker that find, request, make and remove results stores. */
#include "types.h"

METHOD(broker, find_store, (TEXT, name), )
{
	uint64_t serial;
	uint32_t store;
	int status;

	if (!broker_usable(self, "find a results store"))
		return NULL;
	status = shmq_store_find(self->handle, name, &store, &serial);
	if (status == SHMQ_GONE)
		Py_RETURN_NONE;
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "find results store '%s'", name);
	return Py_BuildValue("(IK)", store, (unsigned long long)serial);
}

METHOD(broker, request_store, (TEXT, name)(U32, max_keys)(U64, max_bytes),
       (I64_OR_NONE, timeout, FOR_EVER))
{
	int64_t deadline = later_by(shmq_now(), timeout);
	uint32_t ticket;
	int status;

	BROKER_CALL(self, status,
	            shmq_store_request(self->handle, name, max_keys, max_bytes, until, &ticket));
	if (status == SHMQ_OK)
		status = request_await(self, ticket, deadline);
	if (status != SHMQ_OK)
		return request_raise(self, status, "create results store", name, NULL);
	Py_RETURN_NONE;
}

METHOD(broker, reserve_store, , )
{
	uint64_t serial;
	uint32_t store;
	int status;

	BROKER_CALL(self, status, shmq_store_reserve(self->handle, until, &store, &serial));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, "delete results stores that are not needed",
		                    "reserve a place for a results store");
	return Py_BuildValue("(IK)", store, (unsigned long long)serial);
}

METHOD(broker, create_store,
       (INT, fd)(U32, store)(U64, serial)(TEXT, name)(U32, max_keys)(U64, max_bytes), )
{
	const shmq_store_spec spec = {.store = store,
	                              .max_keys = max_keys,
	                              .serial = serial,
	                              .max_bytes = max_bytes,
	                              .name = name};
	int status;

	BROKER_CALL(self, status, shmq_store_create(self->handle, fd, &spec));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "create results store '%s'", name);
	Py_RETURN_NONE;
}

METHOD(broker, enter_store, (U32, store)(U64, serial)(TEXT, name)(U32, max_keys)(U64, max_bytes), )
{
	const shmq_store_spec spec = {.store = store,
	                              .max_keys = max_keys,
	                              .serial = serial,
	                              .max_bytes = max_bytes,
	                              .name = name};
	int status;

	BROKER_CALL(self, status, shmq_store_enter(self->handle, &spec, until));
	if (status != SHMQ_OK)
		return raise_status(self->state, status, NULL, "enter results store '%s'", name);
	Py_RETURN_NONE;
}

NONE_METHOD(remove_store, (U32, store)(U64, serial), BROKER_CALL,
            shmq_store_remove(self->handle, store, serial, until), "remove results store %u", store)

METHOD(native, reopen_store, (INT, fd), )
{
	int status = shmq_store_reopen(fd);

	if (status != SHMQ_OK)
		return raise_status(PyModule_GetState(self), status, NULL, "open a results store again");
	Py_RETURN_NONE;
}
