-- PostgreSQL's catalogue as far as clients ask for it, in DuckDB's SQL. pg.states, pg.state_columns and pg.types are made before.
-- Numbers without a sign are PostgreSQL's oids for clients.

-- What a fleet has not is there, and empty.
CREATE TABLE pg.pg_am (oid UINTEGER, amname VARCHAR, amtype VARCHAR, amhandler UINTEGER);
CREATE TABLE pg.pg_attrdef (oid UINTEGER, adrelid UINTEGER, adnum UINTEGER, adbin VARCHAR);
CREATE TABLE pg.pg_auth_members (roleid UINTEGER, member UINTEGER, grantor UINTEGER, admin_option VARCHAR);
CREATE TABLE pg.pg_cast (oid UINTEGER, castsource UINTEGER, casttarget UINTEGER, castfunc UINTEGER, castcontext VARCHAR, castmethod
    UINTEGER);
CREATE TABLE pg.pg_collation (oid UINTEGER, collname VARCHAR, collnamespace UINTEGER, collowner UINTEGER, collprovider VARCHAR,
    collisdeterministic UINTEGER, collencoding UINTEGER, collcollate UINTEGER, collctype VARCHAR);
CREATE TABLE pg.pg_constraint (oid UINTEGER, conname VARCHAR, connamespace UINTEGER, contype VARCHAR, condeferrable BOOLEAN,
    condeferred BOOLEAN, convalidated BOOLEAN, conrelid UINTEGER, contypid UINTEGER, conindid UINTEGER, conparentid UINTEGER,
    confrelid UINTEGER, confupdtype VARCHAR, confdeltype VARCHAR, confmatchtype VARCHAR, conislocal BOOLEAN, coninhcount UINTEGER,
    connoinherit BOOLEAN, conkey UINTEGER[], confkey UINTEGER[], conbin VARCHAR);
CREATE TABLE pg.pg_depend (classid UINTEGER, objid UINTEGER, objsubid UINTEGER, refclassid UINTEGER, refobjid UINTEGER, refobjsubid
    UINTEGER, deptype VARCHAR);
CREATE TABLE pg.pg_description (objoid UINTEGER, classoid UINTEGER, objsubid UINTEGER, description VARCHAR);
CREATE TABLE pg.pg_enum (oid UINTEGER, enumtypid UINTEGER, enumsortorder UINTEGER, enumlabel VARCHAR);
CREATE TABLE pg.pg_event_trigger (oid UINTEGER, evtname VARCHAR, evtevent UINTEGER, evtowner UINTEGER, evtfoid UINTEGER, evtenabled
    UINTEGER, evttags VARCHAR[]);
CREATE TABLE pg.pg_extension (oid UINTEGER, extname VARCHAR, extowner UINTEGER, extnamespace UINTEGER, extrelocatable UINTEGER,
    extversion VARCHAR);
CREATE TABLE pg.pg_foreign_data_wrapper (oid UINTEGER, fdwname VARCHAR, fdwowner UINTEGER);
CREATE TABLE pg.pg_foreign_server (oid UINTEGER, srvname VARCHAR, srvowner UINTEGER, srvfdw UINTEGER);
CREATE TABLE pg.pg_foreign_table (ftrelid UINTEGER, ftserver UINTEGER, ftoptions VARCHAR[]);
CREATE TABLE pg.pg_index (indexrelid UINTEGER, indrelid UINTEGER, indnatts UINTEGER, indnkeyatts UINTEGER, indisunique BOOLEAN,
    indisprimary BOOLEAN, indisexclusion BOOLEAN, indimmediate BOOLEAN, indisclustered BOOLEAN, indisvalid BOOLEAN, indisready
    BOOLEAN, indislive BOOLEAN, indisreplident BOOLEAN, indkey UINTEGER[], indcollation UINTEGER[], indclass UINTEGER[], indoption
    UINTEGER[], indexprs VARCHAR, indpred UINTEGER);
CREATE TABLE pg.pg_indexes (schemaname VARCHAR, tablename VARCHAR, indexname VARCHAR, tablespace UINTEGER, indexdef VARCHAR);
CREATE TABLE pg.pg_inherits (inhrelid UINTEGER, inhparent UINTEGER, inhseqno UINTEGER, inhdetachpending UINTEGER);
CREATE TABLE pg.pg_language (oid UINTEGER, lanname VARCHAR, lanowner UINTEGER);
CREATE TABLE pg.pg_matviews (schemaname VARCHAR, matviewname VARCHAR, matviewowner UINTEGER, definition VARCHAR);
CREATE TABLE pg.pg_opclass (oid UINTEGER, opcname VARCHAR, opcmethod UINTEGER, opcdefault BOOLEAN, opcnamespace UINTEGER);
CREATE TABLE pg.pg_partitioned_table (partrelid UINTEGER, partstrat UINTEGER, partnatts UINTEGER, partattrs UINTEGER);
CREATE TABLE pg.pg_policy (oid UINTEGER, polname VARCHAR, polrelid UINTEGER, polcmd UINTEGER, polpermissive BOOLEAN, polroles
    UINTEGER[], polqual UINTEGER, polwithcheck UINTEGER);
CREATE TABLE pg.pg_proc (oid UINTEGER, proname VARCHAR, pronamespace UINTEGER, proowner UINTEGER, prolang UINTEGER, prokind VARCHAR,
    proretset BOOLEAN, prorettype VARCHAR, proargtypes UINTEGER[], proargnames VARCHAR[], proallargtypes UINTEGER[], proargmodes
    UINTEGER, prosrc VARCHAR);
CREATE TABLE pg.pg_publication (oid UINTEGER, pubname VARCHAR, pubowner UINTEGER, puballtables BOOLEAN);
CREATE TABLE pg.pg_publication_rel (oid UINTEGER, prpubid UINTEGER, prrelid UINTEGER, prqual UINTEGER, prattrs UINTEGER);
CREATE TABLE pg.pg_publication_namespace (oid UINTEGER, pnpubid UINTEGER, pnnspid UINTEGER);
CREATE TABLE pg.pg_range (rngtypid UINTEGER, rngsubtype VARCHAR, rngmultitypid UINTEGER, rngcollation UINTEGER, rngsubopc UINTEGER);
CREATE TABLE pg.pg_rewrite (oid UINTEGER, rulename VARCHAR, ev_class UINTEGER, ev_type VARCHAR, ev_enabled UINTEGER, is_instead
    BOOLEAN);
CREATE TABLE pg.pg_sequence (seqrelid UINTEGER, seqtypid UINTEGER, seqstart UINTEGER, seqincrement UINTEGER, seqmax UINTEGER, seqmin
    UINTEGER, seqcache UINTEGER, seqcycle BOOLEAN);
CREATE TABLE pg.pg_sequences (schemaname VARCHAR, sequencename VARCHAR);
CREATE TABLE pg.pg_shdescription (objoid UINTEGER, classoid UINTEGER, description VARCHAR);
CREATE TABLE pg.pg_stat_activity (datid UINTEGER, datname VARCHAR, pid UINTEGER, usename VARCHAR, application_name VARCHAR, state
    VARCHAR, query VARCHAR);
CREATE TABLE pg.pg_statistic_ext (oid UINTEGER, stxrelid UINTEGER, stxname VARCHAR, stxnamespace UINTEGER, stxowner UINTEGER,
    stxkeys UINTEGER[], stxkind VARCHAR[], stxstattarget UINTEGER);
CREATE TABLE pg.pg_stat_user_tables (relid UINTEGER, schemaname VARCHAR, relname VARCHAR, n_live_tup UINTEGER);
CREATE TABLE pg.pg_tablespace (oid UINTEGER, spcname VARCHAR, spcowner UINTEGER, spcacl VARCHAR[], spcoptions VARCHAR[]);
CREATE TABLE pg.pg_timezone_names (name VARCHAR, abbrev VARCHAR, utc_offset UINTEGER, is_dst BOOLEAN);
CREATE TABLE pg.pg_trigger (oid UINTEGER, tgrelid UINTEGER, tgparentid UINTEGER, tgname VARCHAR, tgfoid UINTEGER, tgtype VARCHAR,
    tgenabled UINTEGER, tgisinternal BOOLEAN, tgconstraint UINTEGER);
CREATE TABLE pg.pg_views (schemaname VARCHAR, viewname VARCHAR, viewowner UINTEGER, definition VARCHAR);
CREATE TABLE info.views (table_catalog VARCHAR, table_schema VARCHAR, table_name VARCHAR, view_definition VARCHAR);
CREATE TABLE info.table_constraints (constraint_catalog VARCHAR, constraint_schema VARCHAR, constraint_name VARCHAR, table_catalog
    VARCHAR, table_schema VARCHAR, table_name VARCHAR, constraint_type VARCHAR);
CREATE TABLE info.key_column_usage (constraint_catalog VARCHAR, constraint_schema VARCHAR, constraint_name VARCHAR, table_catalog
    VARCHAR, table_schema VARCHAR, table_name VARCHAR, column_name VARCHAR, ordinal_position UINTEGER);
CREATE TABLE info.constraint_column_usage (table_schema VARCHAR, table_name VARCHAR, column_name VARCHAR, constraint_schema VARCHAR,
    constraint_name VARCHAR);
CREATE TABLE info.referential_constraints (constraint_catalog VARCHAR, constraint_schema VARCHAR, constraint_name VARCHAR,
    unique_constraint_schema VARCHAR, unique_constraint_name VARCHAR);
CREATE TABLE info.routines (routine_catalog VARCHAR, routine_schema VARCHAR, routine_name VARCHAR, routine_type VARCHAR, data_type
    VARCHAR);
CREATE TABLE info.sequences (sequence_catalog VARCHAR, sequence_schema VARCHAR, sequence_name VARCHAR);

CREATE VIEW pg.pg_namespace AS SELECT unnest([11, 2200, 13000])::UINTEGER AS oid, unnest(['pg_catalog', 'public',
    'information_schema']) AS nspname, 10::UINTEGER AS nspowner, NULL::VARCHAR[] AS nspacl;
CREATE VIEW pg.pg_roles AS SELECT 10::UINTEGER AS oid, 'statefleet' AS rolname, false AS rolsuper, true AS rolinherit, false AS
    rolcreaterole, false AS rolcreatedb, true AS rolcanlogin, false AS rolreplication, -1 AS rolconnlimit, NULL::VARCHAR AS
    rolpassword, NULL::TIMESTAMP AS rolvaliduntil, false AS rolbypassrls, NULL::VARCHAR AS rolconfig;
CREATE VIEW pg.pg_user AS SELECT rolname AS usename, oid AS usesysid, rolcreatedb AS usecreatedb, rolsuper AS usesuper FROM
    pg.pg_roles;
CREATE VIEW pg.pg_authid AS FROM pg.pg_roles;
CREATE VIEW pg.pg_database AS SELECT 1::UINTEGER AS oid, 'statefleet' AS datname, 10::UINTEGER AS datdba, 6 AS encoding, 'C' AS
    datcollate, 'C' AS datctype, false AS datistemplate, true AS datallowconn, -1 AS datconnlimit, 1663::UINTEGER AS dattablespace,
    NULL::VARCHAR[] AS datacl;
CREATE VIEW pg.pg_class AS SELECT oid, name AS relname, 2200::UINTEGER AS relnamespace, 0::UINTEGER AS reltype, 0::UINTEGER AS
    reloftype, 10::UINTEGER AS relowner, 0::UINTEGER AS relam, oid AS relfilenode, 0::UINTEGER AS reltablespace, 0 AS relpages,
    -1::FLOAT AS reltuples, 0 AS relallvisible, 0::UINTEGER AS reltoastrelid, false AS relhasindex, false AS relisshared, 'p' AS
    relpersistence, 'r' AS relkind, columns AS relnatts, 0 AS relchecks, false AS relhasoids, false AS relhasrules, false AS
    relhastriggers, false AS relhassubclass, false AS relrowsecurity, false AS relforcerowsecurity, true AS relispopulated, 'n' AS
    relreplident, false AS relispartition, 0::UINTEGER AS relrewrite, NULL::VARCHAR[] AS relacl, NULL::VARCHAR[] AS reloptions,
    NULL::VARCHAR AS relpartbound FROM pg.states;
CREATE VIEW pg.pg_attribute AS SELECT attrelid, attname, atttypid, -1 AS attstattarget, attlen, attnum, 0 AS attndims, -1 AS
    attcacheoff, -1 AS atttypmod, false AS attbyval, 'p' AS attstorage, 'i' AS attalign, false AS attnotnull, false AS atthasdef,
    false AS atthasmissing, '' AS attidentity, '' AS attgenerated, false AS attisdropped, true AS attislocal, 0 AS attinhcount,
    0::UINTEGER AS attcollation, '' AS attcompression, NULL::VARCHAR[] AS attacl, NULL::VARCHAR[] AS attoptions, NULL::VARCHAR[] AS
    attfdwoptions FROM pg.state_columns;
CREATE VIEW pg.pg_type AS SELECT oid, typname, 11::UINTEGER AS typnamespace, 10::UINTEGER AS typowner, typlen, typlen > 0 AS
    typbyval, 'b' AS typtype, typcategory, false AS typispreferred, true AS typisdefined, ',' AS typdelim, 0::UINTEGER AS typrelid,
    typelem, typarray, if(typelem > 0, 'array_in', typname || 'in') AS typinput, if(typelem > 0, 'array_out', typname || 'out') AS
    typoutput, if(typelem > 0, 'array_recv', typname || 'recv') AS typreceive, typname || 'send' AS typsend, false AS typnotnull,
    0::UINTEGER AS typbasetype, -1 AS typtypmod, 0 AS typndims, 0::UINTEGER AS typcollation, NULL::VARCHAR AS typdefault,
    NULL::VARCHAR[] AS typacl FROM pg.types;
CREATE VIEW pg.pg_tables AS SELECT 'public' AS schemaname, name AS tablename, 'statefleet' AS tableowner, NULL::VARCHAR AS
    tablespace, false AS hasindexes, false AS hasrules, false AS hastriggers, false AS rowsecurity FROM pg.states;
CREATE VIEW pg.pg_settings AS SELECT * FROM (VALUES ('server_version', '14.0'), ('server_version_num',
    '140000'), ('max_index_keys', '32'), ('search_path', 'public'),
    ('jit', 'off'), ('standard_conforming_strings', 'on')) AS s(name, setting);
CREATE VIEW info.schemata AS SELECT 'statefleet' AS catalog_name, nspname AS schema_name, 'statefleet' AS schema_owner FROM
    pg.pg_namespace;
CREATE VIEW info.tables AS SELECT 'statefleet' AS table_catalog, 'public' AS table_schema, name AS table_name, 'BASE TABLE' AS
    table_type, 'NO' AS is_insertable_into, 'NO' AS is_typed FROM pg.states;
CREATE VIEW info.columns AS SELECT 'statefleet' AS table_catalog, 'public' AS table_schema, s.name AS table_name, attname AS
    column_name, attnum AS ordinal_position, NULL::VARCHAR AS column_default, 'YES' AS is_nullable, t.sql_name AS data_type,
    NULL::INTEGER AS character_maximum_length, NULL::INTEGER AS numeric_precision, NULL::INTEGER AS numeric_scale, NULL::INTEGER AS
    datetime_precision, 'pg_catalog' AS udt_schema, t.typname AS udt_name, 'NO' AS is_identity, 'NEVER' AS is_generated, 'NO' AS
    is_updatable FROM pg.state_columns JOIN pg.states s ON s.oid = attrelid JOIN pg.types t ON t.oid = atttypid;

CREATE MACRO info._pg_expandarray(a) AS unnest([{'x': a[i], 'n': i} FOR i IN range(1, len(a) + 1)]);
CREATE MACRO pg.version() AS 'PostgreSQL 14.0 (Statefleet)';
CREATE MACRO pg.current_schema() AS 'public';
CREATE MACRO pg.current_schemas(a) AS ['pg_catalog', 'public'];
CREATE MACRO pg.current_database() AS 'statefleet';
CREATE MACRO pg.current_setting(a) AS (SELECT any_value(setting) FROM pg.pg_settings WHERE name = a), (a, b) AS (SELECT
    any_value(setting) FROM pg.pg_settings WHERE name = a);
CREATE MACRO pg.set_config(a, b, c) AS b;
CREATE MACRO pg.format_type(a, b) AS (SELECT any_value(sql_name) FROM pg.types WHERE oid = a);
CREATE MACRO pg.to_regclass(a) AS coalesce((SELECT any_value(oid) FROM pg.states WHERE name = replace(replace(a, 'public.', ''),
    '"', '')), 0);
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
CREATE MACRO pg.quote_ident(a) AS CASE WHEN regexp_full_match(a, '[a-z_][a-z0-9_$]*') AND a NOT IN (SELECT keyword_name FROM
    duckdb_keywords()) THEN a ELSE '"' || replace(a, '"', '""') || '"' END;
CREATE MACRO pg.parse_ident(a) AS [CASE WHEN p LIKE '"%' THEN replace(p[2:-2], '""', '"') ELSE lower(p) END FOR p IN
    regexp_extract_all(a, '"(?:[^"]|"")*"|[^.]+')];
CREATE MACRO pg.format(a, b) AS replace(replace(a, '%s', b), '%I', quote_ident(b)), (a, b, c) AS replace(replace(a, '%s.%s', b ||
    '.' || c), '%I.%I', quote_ident(b) || '.' || quote_ident(c));
CREATE MACRO pg.array_upper(a, b) AS len(a);
CREATE MACRO pg.array_lower(a, b) AS 1;
CREATE MACRO pg.has_schema_privilege(a, b) AS true, (a, b, c) AS true;
CREATE MACRO pg.has_table_privilege(a, b) AS b ILIKE '%select%', (a, b, c) AS c ILIKE '%select%';
CREATE MACRO pg.has_any_column_privilege(a, b) AS b ILIKE '%select%', (a, b, c) AS c ILIKE '%select%';
CREATE MACRO pg.has_database_privilege(a, b) AS b ILIKE '%connect%', (a, b, c) AS c ILIKE '%connect%';
