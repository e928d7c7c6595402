//! Generates the messages and clients of `protos/` with the protoc that a crate brings along.
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    std::env::set_var("PROTOC", protoc_bin_vendored::protoc_bin_path()?);
    let protos = Path::new("../../protos");
    let own = ["connector", "errors", "lease", "registry"];
    let files: Vec<_> = own.iter().map(|name| protos.join(format!("kvlease/v1/{name}.proto"))).collect();
    tonic_prost_build::configure().build_server(false).compile_protos(&files, &[protos.to_path_buf()])?;
    Ok(())
}
