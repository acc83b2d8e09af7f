"""PostgreSQL's catalogue, which clients ask for tables, columns and types: answered by DuckDB over views of that name.

The states are the tables of the schema ``public``. What PostgreSQL has besides (indexes, roles, and so on) is there, and empty, as far as
clients ask for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coordinator.model.errors import StateStoreError
from statefleet.reads.databases import isolated_database
from statefleet.reads.sql import Cancellation, RunningQuery, explained, run_in, tables_of
from statefleet.sql_server.values import TYPES, type_of

if TYPE_CHECKING:
    from statefleet.sql_server.server import States

#: Number of the first state as a table, as PostgreSQL begins with.
_FIRST_OID = 16384
#: Words of which a question to the catalogue has one.
_WORDS = re.compile(
    r"\b(?:pg_\w+|information_schema|version\s*\(|current_(?:schemas?|database|catalog|setting|user)|session_user|format_type|reg(?:class|type)"
    r"|(?:obj|col)_description|has_\w+_privilege|quote_ident|set_config)",
    re.IGNORECASE,
)
#: Of PostgreSQL's dialect, what DuckDB does not know.
_REWRITTEN = (
    (re.compile(r"OPERATOR\s*\(\s*(?:pg_catalog\s*\.)?\s*([^)\s\w]+)\s*\)", re.IGNORECASE), r" \1 "),
    (re.compile(r"\bCOLLATE\s+(?:\"?pg_catalog\"?\s*\.\s*)?\"?(?:default|C)\"?", re.IGNORECASE), " "),
    (re.compile(r"('(?:[^']|'')*')\s*::\s*(?:\"?pg_catalog\"?\s*\.\s*)?\"?(reg(?:class|type))\"?", re.IGNORECASE), r"to_\2(\1)"),
    (re.compile(r"([\w.]+)\s*::\s*(?:\"?pg_catalog\"?\s*\.\s*)?\"?regtype\"?", re.IGNORECASE), r"format_type(\1, NULL)"),
    (
        re.compile(
            r"::\s*(?:\"?pg_catalog\"?\s*\.\s*)?\"?(?:reg(?:class|type|proc|procedure|role|namespace)|name|char|information_schema\.\w+)\"?(?!\w)",
            re.IGNORECASE,
        ),
        "::VARCHAR",
    ),
    (re.compile(r"\bAS\s+(?:\"?pg_catalog\"?\s*\.\s*)?(?:regclass|name)\s*\)", re.IGNORECASE), "AS VARCHAR)"),
    (re.compile(r"(?<!')\"?\bpg_catalog\b\"?\s*\.\s*", re.IGNORECASE), ""),
    (re.compile(r"(?<!')\"?\binformation_schema\b\"?\s*\.\s*", re.IGNORECASE), "info."),
    (re.compile(r"\bcurrent_database\b(?!\s*\()", re.IGNORECASE), "current_database()"),
    (re.compile(r"\bjson_build_object\b", re.IGNORECASE), "json_object"),
    (re.compile(r"\bcurrent_catalog\b", re.IGNORECASE), "'statefleet'"),
    (re.compile(r"\b(?:current_user|session_user)\b(?!\s*\()", re.IGNORECASE), "'statefleet'"),
)
_SQL_NAMES = {
    "int2": "smallint", "int4": "integer", "int8": "bigint", "float4": "real", "float8": "double precision", "bool": "boolean",
    "timestamp": "timestamp without time zone", "timestamptz": "timestamp with time zone", "time": "time without time zone",
}  # fmt: skip
#: Kinds of types, by which drivers choose how to read them.
_CATEGORIES = {"bool": "B", "text": "S", "bytea": "U", "json": "U", "interval": "T"}
_CATEGORIES |= dict.fromkeys(("date", "time", "timestamp", "timestamptz"), "D")

#: What the catalogue is made of. Drivers take numbers without a sign for PostgreSQL's oids.
_STATES = {"oid": pa.uint32(), "name": pa.string(), "columns": pa.int16()}
_COLUMNS = {
    "attrelid": pa.uint32(), "attname": pa.string(), "atttypid": pa.uint32(), "attlen": pa.int16(), "attnum": pa.int16()
}  # fmt: skip
_TYPES = {
    "oid": pa.uint32(), "typname": pa.string(), "typlen": pa.int16(), "typcategory": pa.string(), "typelem": pa.uint32(),
    "typarray": pa.uint32(), "sql_name": pa.string(),
}  # fmt: skip
#: Tables that are empty here, with the columns that clients read of them.
_EMPTY = """
pg_am oid amname amtype amhandler
pg_attrdef oid adrelid adnum adbin
pg_auth_members roleid member grantor admin_option
pg_cast oid castsource casttarget castfunc castcontext castmethod
pg_collation oid collname collnamespace collowner collprovider collisdeterministic collencoding collcollate collctype
pg_constraint oid conname connamespace contype condeferrable condeferred convalidated conrelid contypid conindid conparentid confrelid confupdtype confdeltype confmatchtype conislocal coninhcount connoinherit conkey confkey conbin
pg_depend classid objid objsubid refclassid refobjid refobjsubid deptype
pg_description objoid classoid objsubid description
pg_enum oid enumtypid enumsortorder enumlabel
pg_event_trigger oid evtname evtevent evtowner evtfoid evtenabled evttags
pg_extension oid extname extowner extnamespace extrelocatable extversion
pg_foreign_data_wrapper oid fdwname fdwowner
pg_foreign_server oid srvname srvowner srvfdw
pg_foreign_table ftrelid ftserver ftoptions
pg_index indexrelid indrelid indnatts indnkeyatts indisunique indisprimary indisexclusion indimmediate indisclustered indisvalid indisready indislive indisreplident indkey indcollation indclass indoption indexprs indpred
pg_indexes schemaname tablename indexname tablespace indexdef
pg_inherits inhrelid inhparent inhseqno inhdetachpending
pg_language oid lanname lanowner
pg_matviews schemaname matviewname matviewowner definition
pg_opclass oid opcname opcmethod
pg_partitioned_table partrelid partstrat partnatts partattrs
pg_policy oid polname polrelid polcmd polpermissive polroles polqual polwithcheck
pg_proc oid proname pronamespace proowner prolang prokind proretset prorettype proargtypes proargnames proallargtypes proargmodes prosrc
pg_publication oid pubname pubowner puballtables
pg_publication_rel oid prpubid prrelid prqual prattrs
pg_publication_namespace oid pnpubid pnnspid
pg_range rngtypid rngsubtype rngmultitypid rngcollation rngsubopc
pg_rewrite oid rulename ev_class ev_type ev_enabled is_instead
pg_sequence seqrelid seqtypid seqstart seqincrement seqmax seqmin seqcache seqcycle
pg_sequences schemaname sequencename
pg_shdescription objoid classoid description
pg_stat_activity datid datname pid usename application_name state query
pg_statistic_ext oid stxrelid stxname stxnamespace stxowner stxkeys stxkind stxstattarget
pg_stat_user_tables relid schemaname relname n_live_tup
pg_tablespace oid spcname spcowner spcacl spcoptions
pg_timezone_names name abbrev utc_offset is_dst
pg_trigger oid tgrelid tgparentid tgname tgfoid tgtype tgenabled tgisinternal tgconstraint
pg_views schemaname viewname viewowner definition
info.views table_catalog table_schema table_name view_definition
info.table_constraints constraint_catalog constraint_schema constraint_name table_catalog table_schema table_name constraint_type
info.key_column_usage constraint_catalog constraint_schema constraint_name table_catalog table_schema table_name column_name ordinal_position
info.constraint_column_usage table_schema table_name column_name constraint_schema constraint_name
info.referential_constraints constraint_catalog constraint_schema constraint_name unique_constraint_schema unique_constraint_name
info.routines routine_catalog routine_schema routine_name routine_type data_type
info.sequences sequence_catalog sequence_schema sequence_name
"""
#: Columns of these that are lists, and others that are no numbers.
_LISTS = re.compile(r"polroles|acl$|conkey|confkey|indkey|stxkeys|stxkind|options$|proargtypes|proallargtypes|proargmodes|proargnames")
_TEXTS = re.compile(r"name$|text|definition|def$|description|version|type$|kind$|prov|bin$|expr|src|query|state|labels?|schema$|catalog$|tags|acl|options|is_|abbrev|default")
_VIEWS = """
CREATE VIEW pg.pg_namespace AS SELECT unnest([11, 2200, 13000])::UINTEGER AS oid,
    unnest(['pg_catalog', 'public', 'information_schema']) AS nspname, 10::UINTEGER AS nspowner, NULL::VARCHAR[] AS nspacl;
CREATE VIEW pg.pg_roles AS SELECT 10::UINTEGER AS oid, 'statefleet' AS rolname, false AS rolsuper, true AS rolinherit, false AS rolcreaterole,
    false AS rolcreatedb, true AS rolcanlogin, false AS rolreplication, -1 AS rolconnlimit, NULL::VARCHAR AS rolpassword,
    NULL::TIMESTAMP AS rolvaliduntil, false AS rolbypassrls, NULL::VARCHAR AS rolconfig;
CREATE VIEW pg.pg_user AS SELECT rolname AS usename, oid AS usesysid, rolcreatedb AS usecreatedb, rolsuper AS usesuper FROM pg.pg_roles;
CREATE VIEW pg.pg_authid AS FROM pg.pg_roles;
CREATE VIEW pg.pg_database AS SELECT 1::UINTEGER AS oid, 'statefleet' AS datname, 10::UINTEGER AS datdba, 6 AS encoding, 'C' AS datcollate,
    'C' AS datctype, false AS datistemplate, true AS datallowconn, -1 AS datconnlimit, 1663::UINTEGER AS dattablespace, NULL::VARCHAR[] AS datacl;
CREATE VIEW pg.pg_class AS SELECT oid, name AS relname, 2200::UINTEGER AS relnamespace, 0::UINTEGER AS reltype, 0::UINTEGER AS reloftype,
    10::UINTEGER AS relowner, 0::UINTEGER AS relam, oid AS relfilenode, 0::UINTEGER AS reltablespace, 0 AS relpages, -1::FLOAT AS reltuples,
    0 AS relallvisible, 0::UINTEGER AS reltoastrelid, false AS relhasindex, false AS relisshared, 'p' AS relpersistence, 'r' AS relkind,
    columns AS relnatts, 0 AS relchecks, false AS relhasoids, false AS relhasrules, false AS relhastriggers, false AS relhassubclass,
    false AS relrowsecurity, false AS relforcerowsecurity, true AS relispopulated, 'n' AS relreplident, false AS relispartition,
    0::UINTEGER AS relrewrite, NULL::VARCHAR[] AS relacl, NULL::VARCHAR[] AS reloptions, NULL::VARCHAR AS relpartbound FROM pg.states;
CREATE VIEW pg.pg_attribute AS SELECT attrelid, attname, atttypid, -1 AS attstattarget, attlen, attnum, 0 AS attndims, -1 AS attcacheoff,
    -1 AS atttypmod, false AS attbyval, 'p' AS attstorage, 'i' AS attalign, false AS attnotnull, false AS atthasdef,
    false AS atthasmissing, '' AS attidentity, '' AS attgenerated, false AS attisdropped, true AS attislocal, 0 AS attinhcount,
    0::UINTEGER AS attcollation, '' AS attcompression, NULL::VARCHAR[] AS attacl, NULL::VARCHAR[] AS attoptions,
    NULL::VARCHAR[] AS attfdwoptions FROM pg.state_columns;
CREATE VIEW pg.pg_type AS SELECT oid, typname, 11::UINTEGER AS typnamespace, 10::UINTEGER AS typowner, typlen, typlen > 0 AS typbyval,
    'b' AS typtype, typcategory, false AS typispreferred, true AS typisdefined, ',' AS typdelim, 0::UINTEGER AS typrelid, typelem, typarray,
    if(typelem > 0, 'array_in', typname || 'in') AS typinput, if(typelem > 0, 'array_out', typname || 'out') AS typoutput,
    if(typelem > 0, 'array_recv', typname || 'recv') AS typreceive, typname || 'send' AS typsend, false AS typnotnull,
    0::UINTEGER AS typbasetype, -1 AS typtypmod, 0 AS typndims, 0::UINTEGER AS typcollation, NULL::VARCHAR AS typdefault, NULL::VARCHAR[] AS typacl
    FROM pg.types;
CREATE VIEW pg.pg_tables AS SELECT 'public' AS schemaname, name AS tablename, 'statefleet' AS tableowner, NULL::VARCHAR AS tablespace,
    false AS hasindexes, false AS hasrules, false AS hastriggers, false AS rowsecurity FROM pg.states;
CREATE VIEW pg.pg_settings AS SELECT * FROM (VALUES ('server_version', '14.0'), ('max_index_keys', '32'), ('search_path', 'public'), ('jit', 'off'),
    ('standard_conforming_strings', 'on')) AS s(name, setting);
CREATE VIEW info.schemata AS SELECT 'statefleet' AS catalog_name, nspname AS schema_name, 'statefleet' AS schema_owner FROM pg.pg_namespace;
CREATE VIEW info.tables AS SELECT 'statefleet' AS table_catalog, 'public' AS table_schema, name AS table_name, 'BASE TABLE' AS table_type,
    'NO' AS is_insertable_into, 'NO' AS is_typed FROM pg.states;
CREATE VIEW info.columns AS SELECT 'statefleet' AS table_catalog, 'public' AS table_schema, s.name AS table_name, attname AS column_name,
    attnum AS ordinal_position, NULL::VARCHAR AS column_default, 'YES' AS is_nullable, t.sql_name AS data_type,
    NULL::INTEGER AS character_maximum_length, NULL::INTEGER AS numeric_precision, NULL::INTEGER AS numeric_scale,
    NULL::INTEGER AS datetime_precision, 'pg_catalog' AS udt_schema, t.typname AS udt_name, 'NO' AS is_identity, 'NEVER' AS is_generated,
    'NO' AS is_updatable FROM pg.state_columns JOIN pg.states s ON s.oid = attrelid JOIN pg.types t ON t.oid = atttypid;
CREATE MACRO pg.version() AS 'PostgreSQL 14.0 (Statefleet)';
CREATE MACRO pg.current_schema() AS 'public';
CREATE MACRO pg.current_schemas(a) AS ['pg_catalog', 'public'];
CREATE MACRO pg.current_database() AS 'statefleet';
CREATE MACRO pg.current_setting(a) AS (SELECT any_value(setting) FROM pg.pg_settings WHERE name = a),
    (a, b) AS (SELECT any_value(setting) FROM pg.pg_settings WHERE name = a);
CREATE MACRO pg.set_config(a, b, c) AS b;
CREATE MACRO pg.format_type(a, b) AS (SELECT any_value(sql_name) FROM pg.types WHERE oid = a);
CREATE MACRO pg.to_regclass(a) AS coalesce((SELECT any_value(oid) FROM pg.states WHERE name = replace(replace(a, 'public.', ''), '"', '')), 0);
CREATE MACRO pg.to_regtype(a) AS (SELECT any_value(oid) FROM pg.types WHERE a IN (typname, sql_name));
CREATE MACRO pg.pg_get_function_result(a) AS '';
CREATE MACRO pg.pg_get_function_arguments(a) AS '';
CREATE MACRO pg.pg_get_function_identity_arguments(a) AS '';
CREATE MACRO pg.pg_get_userbyid(a) AS 'statefleet';
CREATE MACRO pg.pg_encoding_to_char(a) AS 'UTF8';
CREATE MACRO pg.pg_backend_pid() AS 0;
CREATE MACRO pg.pg_is_in_recovery() AS false;
CREATE MACRO pg.pg_table_is_visible(a) AS true;
CREATE MACRO pg.pg_collation_is_visible(a) AS true;
CREATE MACRO pg.pg_type_is_visible(a) AS true;
CREATE MACRO pg.pg_function_is_visible(a) AS true;
CREATE MACRO pg.pg_relation_is_publishable(a) AS false;
CREATE MACRO pg.pg_get_indexdef(a) AS '', (a, b, c) AS '';
CREATE MACRO pg.pg_get_constraintdef(a) AS '', (a, b) AS '';
CREATE MACRO pg.pg_get_viewdef(a) AS '', (a, b) AS '';
CREATE MACRO pg.pg_get_expr(a, b) AS NULL::VARCHAR, (a, b, c) AS NULL::VARCHAR;
CREATE MACRO pg.pg_get_serial_sequence(a, b) AS NULL::VARCHAR;
CREATE MACRO pg.pg_get_partkeydef(a) AS NULL::VARCHAR;
CREATE MACRO pg.pg_get_statisticsobjdef_columns(a) AS NULL::VARCHAR;
CREATE MACRO pg.pg_tablespace_location(a) AS '';
CREATE MACRO pg.pg_total_relation_size(a) AS 0;
CREATE MACRO pg.pg_relation_size(a) AS 0;
CREATE MACRO pg.pg_table_size(a) AS 0;
CREATE MACRO pg.pg_database_size(a) AS 0;
CREATE MACRO pg.obj_description(a) AS NULL::VARCHAR, (a, b) AS NULL::VARCHAR;
CREATE MACRO pg.shobj_description(a, b) AS NULL::VARCHAR;
CREATE MACRO pg.col_description(a, b) AS NULL::VARCHAR;
CREATE MACRO pg.quote_ident(a) AS '"' || replace(a, '"', '""') || '"';
CREATE MACRO pg.array_upper(a, b) AS len(a);
CREATE MACRO pg.array_lower(a, b) AS 1;
CREATE MACRO pg.has_schema_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO pg.has_table_privilege(a, b) AS b ILIKE '%select%', (a, b, c) AS c ILIKE '%select%';
CREATE MACRO pg.has_any_column_privilege(a, b) AS b ILIKE '%select%', (a, b, c) AS c ILIKE '%select%';
CREATE MACRO pg.has_database_privilege(a, b) AS b ILIKE '%connect%', (a, b, c) AS c ILIKE '%connect%';
"""


class Catalogue:
    """The catalogue of a fleet's states."""

    def __init__(self, states: States) -> None:
        self._states = states

    @staticmethod
    def may_answer(text: str) -> bool:
        """Return whether a statement has a word of the catalogue. Whether its tables are the catalogue's, :meth:`running` says."""
        return _WORDS.search(text) is not None

    @contextmanager
    def running(
        self,
        query: str,
        parameters: Sequence[Any] | None,
        *,
        settings: Mapping[str, str] | None = None,
        cancellation: Cancellation | None = None,
    ) -> Iterator[tuple[RunningQuery, list[pa.DataType | None]] | None]:
        """Run a query over the catalogue, and end it with the block; None if it has other tables. The types of its parameters come along.

        Parameters
        ----------
        parameters
            Values of the parameters; None for nulls.

        Raises
        ------
        InvalidRequestError
            The query is not valid.
        """
        cancellation, text = cancellation or Cancellation(), query
        for pattern, replacement in _REWRITTEN:
            text = pattern.sub(replacement, text)
        with isolated_database(settings or {}) as database, cancellation.watching(database), explained(query):
            names, types = tables_of(database, text)
            if not all(schema == "info" or name.startswith("pg_") for schema, name in names):
                yield None
                return
            self._fill(database)
            given = [None] * len(types) if parameters is None else parameters
            yield run_in(database, query, text, given, cancellation), types

    def _fill(self, database: Any) -> None:
        database.execute("CREATE SCHEMA public; CREATE SCHEMA pg; CREATE SCHEMA info; SET search_path = 'public,pg'")
        tables = dict(self._tables())
        states = [(_FIRST_OID + index, name, len(schema)) for index, (name, schema) in enumerate(tables.items())]
        columns = [
            (_FIRST_OID + index, column.name, kind.oid, kind.size, at)
            for index, schema in enumerate(tables.values())
            for at, column in enumerate(schema, start=1)
            for kind in [type_of(column.type)]
        ]
        types = []
        for oid, of in TYPES.items():
            if oid == of.oid and of.array_oid:
                category = _CATEGORIES.get(of.name, "N")
                shown = _SQL_NAMES.get(of.name, of.name)
                types.append((oid, of.name, of.size, category, 0, of.array_oid, shown))
                types.append((of.array_oid, f"_{of.name}", -1, "A", oid, 0, f"{shown}[]"))
        _create(database, "pg.states", _STATES, states)
        _create(database, "pg.state_columns", _COLUMNS, columns)
        _create(database, "pg.types", _TYPES, types)
        for line in _EMPTY.strip().splitlines():
            name, *fields = line.split()
            kinds = (
                f"{of} {'UINTEGER[]' if _LISTS.search(of) else 'VARCHAR' if _TEXTS.search(of) else 'UINTEGER'}" for of in fields
            )
            database.execute(f"CREATE TABLE {name if '.' in name else f'pg.{name}'} ({', '.join(kinds)})")
        database.execute(_VIEWS)

    def _tables(self) -> Iterator[tuple[str, pa.Schema]]:
        """Yield the states, or their parts, with their columns; none that cannot be read."""
        for name in sorted(self._states.states()):
            with suppress(StateStoreError):
                parts = self._states.state(name).parts
                for table in [f"{name}.{part}" for part in parts] or [name]:
                    yield table, self._states.table(table).schema


def _create(database: Any, name: str, fields: Mapping[str, pa.DataType], rows: Sequence[tuple[Any, ...]]) -> None:
    """Create a table of rows."""
    arrays = [pa.array([row[index] for row in rows], of) for index, of in enumerate(fields.values())]
    database.register("given", pa.table(arrays, names=list(fields)))
    database.execute(f"CREATE TABLE {name} AS FROM given")
    database.unregister("given")
