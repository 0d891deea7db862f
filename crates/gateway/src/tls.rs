//! The host's trust store: read only when something needs it, since it costs a megabyte.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where distributions keep the bundle: Debian, Fedora, SUSE, Alpine.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Why there is no bundle to give.
#[derive(Debug, thiserror::Error)]
pub enum HostCaError {
    /// `SSL_CERT_FILE` names a file that can't be read.
    #[error("read {path}, which SSL_CERT_FILE names")]
    Configured {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// None of the usual files exists.
    #[error("no certificate bundle at any of the usual places ({})", BUNDLES.join(", "))]
    None,
}

/// The file that holds the certificates the host trusts, in PEM: the one that `SSL_CERT_FILE` names, else the
/// distribution's.
///
/// # Errors
/// When there is none that can be read.
pub fn host_ca_bundle() -> Result<PathBuf, HostCaError> {
    if let Some(path) = std::env::var_os("SSL_CERT_FILE").filter(|v| !v.is_empty()).map(PathBuf::from) {
        return match fs::File::open(&path) {
            Ok(_) => Ok(path),
            Err(source) => Err(HostCaError::Configured { path, source }),
        };
    }
    BUNDLES.iter().map(Path::new).find(|p| fs::File::open(p).is_ok()).map(Path::to_owned).ok_or(HostCaError::None)
}
